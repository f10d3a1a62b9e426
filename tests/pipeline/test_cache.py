"""The logits stage: codecs by configuration, what is bad is named and mended, a dry run writes nothing."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from data.dense import Dense
from data.logit_cache import LogitCache
from data.responses import Request, Response
from data.serving import refusal
from data.states import States
from data.targets import DenseTargets, SparseTargets
from pipeline import config as settings
from pipeline import logits, rehearsal, teacher, tiny
from pipeline.check import check
from pipeline.choice import candidates
from pipeline.choices import Divergence, Stage
from pipeline.coding import estimate, parts
from pipeline.config import Codec, Config, Logits, Objective
from pipeline.errors import PipelineError
from pipeline.losses import forward_kl, support
from pipeline.objective import values
from pipeline.teacher import check_plain_head
from tests.pipeline.conftest import SMOKE, digest, only


def shards(work) -> list:
    return sorted(only(work / "artifacts" / "logits").rglob("shard-*.safetensors"))


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)


def test_a_bad_shard_is_named_by_verify_and_alone_written_again_by_repair(work, attempt):
    code, stderr = attempt(SMOKE, "stages=[logits]", "logits.verify=true", work=work)
    assert code == 0, stderr
    before, times = digest(work / "artifacts" / "logits"), {path: path.stat().st_mtime_ns for path in shards(work)}
    flipped, cut, gone, whole = shards(work)[:4]
    flip(flipped)
    cut.write_bytes(cut.read_bytes()[:-40])
    gone.unlink()
    code, stderr = attempt(SMOKE, "stages=[logits]", "logits.verify=true", work=work)
    assert code == 2
    for path, why in ((flipped, "its content differs"), (cut, "damaged"), (gone, "missing")):
        assert re.search(rf"{re.escape(str(path))}: this shard is .*{why}|{re.escape(str(path))}: this shard is {why}", stderr)
    assert str(whole) not in stderr
    assert "logits.repair=true" in stderr
    code, stderr = attempt(SMOKE, "stages=[logits]", "logits.repair=true", work=work)
    assert code == 0, stderr
    assert digest(work / "artifacts" / "logits") == before
    unmoved = {path for path, when in times.items() if path.stat().st_mtime_ns == when}
    assert unmoved == set(times) - {flipped, cut, gone}


@pytest.mark.parametrize(("count", "named"), [(40, 40), (97, 40)])
def test_many_bad_shards_are_counted_and_the_remedy_is_still_said(work, attempt, monkeypatch, count, named):
    places = [work / f"shard-{number:05}" for number in range(count)]
    monkeypatch.setattr(logits, "_bad", lambda *_: {place: f"{place}: this shard is missing" for place in places})
    code, stderr = attempt(SMOKE, "stages=[logits]", "logits.verify=true", work=work)
    assert code == 2
    lines = stderr[stderr.index("logits.verify: ") :].splitlines()
    assert sum("this shard is missing" in line for line in lines) == named
    assert lines[named:] == ([f"and {count - named} more"] if count > named else []) + [
        "write them again with logits.repair=true"
    ]


def test_verify_without_a_finished_cache(work, attempt):
    code, stderr = attempt(SMOKE, "stages=[logits]", "logits.verify=true", "codec.top_k=17", work=work)
    assert code == 2
    assert "logits.verify, logits.repair: " in stderr
    assert "codec.top_k: 16 → 17" in stderr


def test_distillation_refuses_a_damaged_shard_and_says_how_to_mend_it(work, attempt):
    for path in shards(work):
        flip(path)
    code, stderr = attempt(SMOKE, "stages=[distil]", "trainer.max_steps=2", work=work)
    assert code == 2
    assert re.search(r"shard-0000\d\.safetensors: this shard is damaged .*logits\.repair=true", stderr)


def test_text_that_is_not_what_was_encoded_is_noticed(work, attempt, monkeypatch):
    plain = logits.responses

    def altered(context) -> list[Response]:
        rows = plain(context)
        place = next(place for place, row in enumerate(rows) if row.request.split == "train")
        first, *others = rows[place].tokens
        return [*rows[:place], replace(rows[place], tokens=((first + 1) % 256, *others)), *rows[place + 1 :]]

    monkeypatch.setattr(logits, "responses", altered)
    code, stderr = attempt(SMOKE, "stages=[logits]", "logits.verify=true", work=work)
    assert code == 2
    [(found, wanted)] = re.findall(r"this shard is from elsewhere: its ids is ([0-9a-f]{16}), not ([0-9a-f]{16})\n", stderr)
    assert found != wanted


def test_what_temperature_means_is_part_of_the_identity(work, refused, monkeypatch):
    manifest = json.loads((only(work / "artifacts" / "logits") / "manifest.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{16}", manifest["details"]["ids"])
    monkeypatch.setattr(logits, "DISTRIBUTION", "softmax at temperature 0.5")
    message = refused(SMOKE, "stages=[distil]", work=work)
    assert f"\n  distribution: {manifest['identity']['distribution']} → softmax at" in message


def test_a_damaged_shard_of_an_unfinished_cache_is_written_again(work, attempt):
    folder = only(work / "artifacts" / "logits")
    before = digest(folder)
    (folder / "manifest.json").unlink()
    flip(shards(work)[0])
    (folder / "train" / ".shard-00000.safetensors.1.partial").write_bytes(b"half")
    code, stderr = attempt(SMOKE, "stages=[logits]", work=work)
    assert code == 0, stderr
    assert digest(folder).keys() == before.keys()
    assert {n: h for n, h in digest(folder).items() if "shard" in n} == {n: h for n, h in before.items() if "shard" in n}


def test_a_dry_run_prints_every_codec_and_writes_nothing(work, attempt, monkeypatch):
    console = Console(record=True, width=120)
    monkeypatch.setattr(rehearsal, "Console", lambda: console)
    monkeypatch.setattr(teacher, "forward", None)  # states were kept, so the head alone is timed
    monkeypatch.setattr(rehearsal, "forward", None, raising=False)
    before, store = digest(work / "artifacts"), (work / "mlflow.db").read_bytes()
    code, stderr = attempt(SMOKE, "stages=[logits]", "logits.dry_run=true", "codec.top_k=17", work=work)
    assert code == 0, stderr
    assert digest(work / "artifacts") == before
    assert (work / "mlflow.db").read_bytes() == store
    text = console.export_text()
    assert "GB are free, nothing is written" in text
    bytes_by_codec = {name: float(number) for name, number in re.findall(r"^│ (\w+) +│ +([\d.]+) │", text, re.M)}
    assert list(bytes_by_codec) == ["topk", "sampled", "hidden", "dense"]
    assert bytes_by_codec["topk"] < bytes_by_codec["dense"]


@pytest.mark.parametrize(("states", "wanted"), [(None, 28 / 10), (object(), 16 / 4)])
def test_the_time_of_a_pass_is_that_of_a_batch_by_the_positions_that_it_computes(monkeypatch, states, wanted):
    """The batch takes a second: 2 × (3 + 2) of 28 positions through the target, or 2 × 2 of 16 through the head alone."""
    asked = []

    def known(model, batch, states, hidden, ids):
        asked.append((len(batch), states))
        return [torch.zeros(len(response.tokens), ids) for response in batch]

    monkeypatch.setattr(rehearsal, "known", known)
    monkeypatch.setattr(rehearsal.time, "perf_counter", iter([7.0, 8.0]).__next__)
    rows = [Response(Request(count, "train", "0", "test", 1.0, (1, 2, 3)), (4,) * count, False) for count in (2, 2, 4, 8)]
    found = rehearsal.seconds(None, {"train": (rows[:3], Dense()), "validation-1": (rows[3:], Dense())}, 2, states, 9)
    assert found == pytest.approx(wanted)
    assert asked == [(1, states), (2, states)]


def test_the_dry_run_promises_the_size_that_is_written(work):
    details = json.loads((only(work / "artifacts" / "logits") / "manifest.json").read_text())["details"]
    assert details["bytes_estimated"] == pytest.approx(details["bytes"], rel=0.15)


@pytest.mark.parametrize(("codec", "kind"), [("hidden", DenseTargets), ("sampled", SparseTargets), ("dense", DenseTargets)])
def test_every_codec_writes_a_cache_that_reads_as_the_target_says(work, attempt, codec, kind):
    shutil.rmtree(work / "artifacts" / "logits")
    code, stderr = attempt(SMOKE, "stages=[logits]", f"codec={codec}", "codec.bits=8", work=work)
    assert code == 0, stderr
    folder = only(work / "artifacts" / "logits")
    manifest = json.loads((folder / "manifest.json").read_text())
    found, metrics = manifest["details"]["fidelity"], manifest["metrics"]
    assert metrics["logits/overlap_bias"] == found["overlap_bias"]
    assert found["overlap_lower"] - 1e-3 <= found["overlap"] <= found["overlap_upper"] + 1e-3
    assert abs(found["overlap_bias"]) <= 4 * found["overlap_standard_error"] + 1e-3
    cache = LogitCache(folder / "train", folder.name)
    assert isinstance(cache[0].targets, kind)
    if kind is DenseTargets:
        assert found["kl"] < 1e-3
        torch.testing.assert_close(cache[0].targets.log_probs.exp().sum(-1), torch.ones(len(cache[0].targets.log_probs)))


@pytest.mark.parametrize(("error", "kind"), [(0.5, "TopK"), (1e-9, "Dense")])
def test_auto_takes_the_cheapest_codec_that_is_good_enough_and_stays_with_it(work, attempt, error, kind):
    shutil.rmtree(work / "artifacts" / "logits")
    overrides = [SMOKE, "stages=[logits]", "codec=auto", f"codec.max_overlap_error={error}"]
    code, stderr = attempt(*overrides, work=work)
    assert code == 0, stderr
    folder = only(work / "artifacts" / "logits")
    manifest = json.loads((folder / "manifest.json").read_text())
    chosen = json.loads(manifest["details"]["codec"])
    assert chosen["codec"] == kind
    if kind == "TopK":
        assert (chosen["top_k"], chosen["tail_samples"]) in ((8, 0), (8, 6))
    shards(work)[0].unlink()
    code, stderr = attempt(*overrides, "logits.repair=true", work=work)
    assert code == 0, stderr
    assert LogitCache(folder / "train", folder.name)[0]


def test_auto_offers_only_what_the_objective_can_learn_from(tmp_path):
    tiny.make(tmp_path, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    request = Request(0, "train", "0", "test", 1.0, (1, 2, 3))
    rows = [Response(request, (4, 5, 6), False)]
    for divergence in Divergence:
        offered = candidates(Config(objective=Objective(divergence)), model, rows)
        assert offered
        assert all(refusal(c.kind.name, divergence.name) is None for c in offered)
    sizes = [estimate({"train": parts(Config(codec=c), rows)["train"]}, model, Config(codec=c)) for c in offered]
    assert sizes == sorted(sizes)


def test_auto_and_the_dry_run_say_that_a_state_is_beyond_half_precision(work, refused, attempt, monkeypatch):
    console, plain = Console(record=True, width=200), States.of
    monkeypatch.setattr(rehearsal, "Console", lambda: console)
    monkeypatch.setattr(States, "of", lambda states, key: plain(states, key) * 1e6)
    message = refused(SMOKE, "stages=[logits]", "codec=auto", work=work)
    assert message.startswith("draftsmith: codec.kind=auto: a hidden state does not fit into half precision, which codec=")
    assert "use codec=topk, or codec=dense" in message
    code, stderr = attempt(SMOKE, "stages=[logits]", "logits.dry_run=true", work=work)
    assert code == 0, stderr
    assert re.search(r"│ hidden .* no +│ +a hidden state does not fit into half precision │", console.export_text())


@pytest.mark.parametrize("overrides", [("codec=sampled",), ("codec.tail_samples=4", "objective=hybrid")])
def test_a_draft_learns_from_drawn_ids(work, attempt, overrides):
    code, stderr = attempt(SMOKE, "stages=[logits,distil]", *overrides, "trainer.max_steps=2", work=work)
    assert code == 0, stderr


def test_a_hidden_codec_needs_logits_that_are_head_times_state(tmp_path):
    tiny.make(tmp_path / "model", 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    check_plain_head(model)
    plain = model.forward

    def capped(**options):
        outputs = plain(**options)
        outputs.logits = 3 * torch.tanh(outputs.logits / 3)
        return outputs

    model.forward = capped
    with pytest.raises(PipelineError, match="changes its logits after its head; use codec=topk"):
        check_plain_head(model)


def codecs() -> list[Codec]:
    return [Codec(kind=kind, tail_samples=drawn) for kind in settings.Coding if kind.name != "auto" for drawn in (0, 4)]


@pytest.mark.parametrize("codec", codecs(), ids=str)
@pytest.mark.parametrize("divergence", Divergence)
def test_what_a_codec_cannot_serve_is_refused_with_one_that_can(codec, divergence):
    dense = codec.kind.name in ("hidden", "dense")
    drawn = codec.kind.name == "sampled" or (codec.kind.name == "topk" and codec.tail_samples > 0)
    assert codec.draws is drawn
    message = refusal(codec.kind.name, divergence.name)
    given = Config(codec=codec, objective=Objective(divergence=divergence), target=settings.Target(path="x"))
    if divergence is Divergence.reverse_kl and not dense:
        assert f"codec={codec.kind.name} does not keep; use codec=hidden" in message
    elif divergence in (Divergence.overlap, Divergence.hybrid) and codec.kind.name == "sampled":
        assert "draws all of them; use codec=topk" in message
    else:
        assert message is None
        check(given)
        return
    with pytest.raises(PipelineError, match=rf"^objective\.divergence={divergence.name}: .*use codec="):
        check(given)


@pytest.mark.parametrize("divergence", Divergence)
def test_what_is_refused_on_drawn_ids_is_what_the_losses_refuse(divergence):
    ids = torch.tensor([[1, 0]])
    target = support(SparseTargets(ids, torch.tensor([[0.5, 0.25]]).log(), torch.tensor([-torch.inf]), torch.ones(1, 2)), None)
    log_q = torch.tensor([[0.5, 0.3, 0.2]]).log()
    if refusal("topk", divergence.name) is None:
        assert torch.isfinite(values(Objective(divergence=divergence), log_q, target, ids[:, 0])).all()
    else:
        with pytest.raises(ValueError, match="weights of drawn ids would have no bound"):
            values(Objective(divergence=divergence), log_q, target, ids[:, 0])


@pytest.mark.parametrize("key", ["dry_run", "verify", "repair"])
def test_looking_at_the_cache_is_for_its_stage_alone(key):
    given = Config(logits=Logits(**{key: True}), target=settings.Target(path="x"))
    with pytest.raises(PipelineError, match=rf"^logits\.{key}=true: .*stages=\[logits\]"):
        check(given)
    check(Config(logits=Logits(**{key: True}), target=settings.Target(path="x"), stages=[Stage.logits]))


def test_support_of_a_dense_target_is_exact_and_begins_with_the_best():
    log_p = torch.tensor([[0.1, 0.2, 0.6, 0.1], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    whole = support(DenseTargets(log_p), None)
    assert whole.ids.tolist() == [[2, 0, 1, 2, 3], [0, 0, 1, 2, 3]]
    p = torch.tensor([[0.6, 0.1, 0.2, 0.0, 0.1], [0.7, 0.0, 0.1, 0.1, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(whole.p, p)
    assert whole.tail.tolist() == [0.0, 0.0]
    log_q = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 2, dtype=torch.float64).log()
    exact = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(forward_kl(log_q, whole), exact)
    trimmed = support(DenseTargets(log_p), torch.tensor([-1, 0, 1, -1]))
    assert trimmed.ids.shape == (2, 3)  # ids that the draft lacks cost nothing
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    half = torch.full((2, 2), 0.5, dtype=torch.float64).log()
    torch.testing.assert_close(forward_kl(half, trimmed), (p * (p.log() - half)).sum(-1))


def test_support_hands_weights_on():
    targets = SparseTargets(torch.tensor([[2, 0]]), torch.zeros(1, 2), torch.tensor([-torch.inf]), torch.tensor([[1.0, 3.0]]))
    for draft_ids in (None, torch.tensor([0, -1, 1])):
        found = support(targets, draft_ids)
        assert (found.weights.tolist(), found.tail.tolist()) == ([[1.0, 3.0]], [0.0])
