"""Where the text comes from that a draft learns from: given answers, the target's own prompts, rollouts; what is refused."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from data.artifact import MANIFEST
from data.logit_cache import LogitCache
from data.prompts import prompt
from data.responses import Request, read_shards
from pipeline.choices import Text
from pipeline.config import Config, Regime
from pipeline.errors import PipelineError
from pipeline.requests import SEED, answer, frame, portion
from pipeline.tiny import byte_tokenizer
from tests.pipeline.conftest import SMOKE, digest

LEARN = "stages=[corpus,generate,logits,distil]"


def made(work, stage: str):
    """The folder of the result of ``stage`` that was made last."""
    return max((work / "artifacts" / stage).glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime).parent


def details(folder) -> dict:
    return json.loads((folder / MANIFEST).read_text())["details"]


def of(folder, split: str) -> list:
    return [response for response in read_shards(folder) if response.request.split == split]


@pytest.mark.parametrize("step", [0.6180339887498949, 0.41421356237309515])
def test_shares_are_met_evenly(step):
    for count in (10, 100, 1000):
        found = Counter(portion(place, [0.5, 0.3, 0.2], step) for place in range(count))
        assert all(abs(found[k] - share * count) <= 3 for k, share in enumerate((0.5, 0.3, 0.2)))
    assert {portion(place, [1.0, 0.0], step) for place in range(1000)} == {0}


def test_a_given_answer_ends_as_the_target_would_end_it():
    tokenizer, request = byte_tokenizer(), Request(0, "train", "", "", 1.0, (1,))
    whole = answer(request, prompt("s", "k", "t", "abc"), tokenizer, 4)
    assert tokenizer.decode(whole.tokens) == "abc<|end|>"
    assert whole.stopped
    cut = answer(request, prompt("s", "k", "t", "abcd"), tokenizer, 4)
    assert tokenizer.decode(cut.tokens) == "abcd"
    assert not cut.stopped


def test_the_frame_of_a_users_turn():
    tokenizer = byte_tokenizer()
    before, behind = (tokenizer.decode(ids) for ids in frame(tokenizer, "Be brief."))
    assert before == "<|start|>system\nBe brief.<|end|>\n<|start|>user\n"
    assert behind == "<|end|>\n<|start|>assistant\n"
    tokenizer.chat_template = None
    with pytest.raises(PipelineError, match=r"regime\.kind=seeds: the target has no chat template"):
        frame(tokenizer, None)


def test_answers_of_the_users_own(work, attempt, tmp_path):
    path = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"Count to {i}.", "answer": f"one, two, {i}" if i % 4 else None} for i in range(90)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    mine = ("corpus=dataset", f"corpus.path={path}", "corpus.response_column=answer", "corpus.train=24")
    code, stderr = attempt(SMOKE, LEARN, *mine, "corpus.validation=4", "corpus.test=4", "regime=corpus", work=work)
    assert code == 0, stderr
    folder, tokenizer = made(work, "generate"), byte_tokenizer()
    found = {tokenizer.decode(r.request.prompt).split("\n")[1]: tokenizer.decode(r.tokens) for r in of(folder, "train")}
    assert 0 < len(found) < 24
    assert all(text == f"one, two, {said.split()[2][:-8]}<|end|>" for said, text in found.items())
    assert details(folder)["given_responses"] == len(found)
    assert details(folder)["prompts_without_answer"] == 24 - len(found)
    assert all(not tokenizer.decode(r.tokens).startswith("one, two") for r in of(folder, "validation"))
    cache = LogitCache(made(work, "logits") / "train", made(work, "logits").name)
    target = AutoModelForCausalLM.from_pretrained(next((work / "targets").glob("*/config.json")).parent)
    with torch.inference_mode():
        for row in (cache[0], cache[len(cache) - 1]):
            wanted = target(input_ids=row.tokens[None]).logits[0, row.start - 1 : -1].log_softmax(-1)
            kept = row.targets.log_probs[:, : row.targets.certain]
            torch.testing.assert_close(kept, wanted.gather(1, row.targets.ids[:, : row.targets.certain]), atol=0.05, rtol=0.02)


def test_the_librarys_own_code_as_answers(work, attempt):
    code, stderr = attempt(SMOKE, "stages=[corpus,generate]", "regime=corpus", "regime.share=0.5", work=work)
    assert code == 0, stderr
    folder, tokenizer = made(work, "generate"), byte_tokenizer()
    written = [tokenizer.decode(r.tokens) for r in of(folder, "train") if r.request.kind == "write"]
    given = details(folder)["given_responses"]
    assert given > 0
    assert sum(text.startswith("```python\n") for text in written) == given < len(written)
    assert details(folder)["prompts_without_answer"] == pytest.approx(24 - given, abs=3)


def test_prompts_that_the_target_writes(work, attempt):
    before = made(work, "generate")
    overrides = (SMOKE, "stages=[corpus,generate]", "regime=seeds", "regime.share=0.5")
    code, stderr = attempt(*overrides, work=work)
    assert code == 0, stderr
    folder, tokenizer = made(work, "generate"), byte_tokenizer()
    train = of(folder, "train")
    assert Counter(r.request.kind == SEED for r in train)[True] == pytest.approx(24, abs=2)
    assert len(train) == 48
    for response in train:
        text = tokenizer.decode(response.request.prompt)
        assert text.endswith("<|end|>\n<|start|>assistant\n")
    own = [r.request.prompt for r in train if r.request.kind == SEED]
    assert len(set(own)) == len(own)
    for split in ("validation", "test"):  # nothing that is measured changes
        assert [r.request for r in of(folder, split)] == [r.request for r in of(before, split)]
    whole = digest(folder)
    for name in (MANIFEST, "seeds/shard-00001.parquet", "shard-00001.parquet"):
        (folder / name).unlink()
    code, stderr = attempt(*overrides, work=work)
    assert code == 0, stderr
    again = digest(folder)
    whole.pop(MANIFEST), again.pop(MANIFEST)  # its seconds differ
    assert again == whole


def test_rollouts_are_a_second_stage(work, attempt, refused):
    first = made(work, "distil") / "draft"
    overrides = (SMOKE, "stages=[logits,distil]", "regime=rollouts", f"draft.path={first}", "regime.starts=3")
    code, stderr = attempt(*overrides, "regime.share=0.5", work=work)
    assert code == 0, stderr
    folder = made(work, "logits")
    rollouts, train = (LogitCache(folder / part, folder.name) for part in ("rollouts", "train"))
    assert len(rollouts) == len(train)
    row = rollouts[0]
    assert len(row.cuts) == len(row.survival) == len(row.tokens) - row.start == 6
    assert bool(((row.survival >= 0) & (row.survival <= 1)).all())
    assert (made(work, "distil") / "draft" / "draft.safetensors").is_file()
    code, stderr = attempt(*overrides, "regime.share=0.25", work=work)  # shares share the cache
    assert code == 0, stderr
    assert made(work, "logits") == folder
    assert len(list((work / "artifacts" / "distil").glob(f"*/{MANIFEST}"))) == 3
    shard = folder / "rollouts" / "shard-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    message = refused(*overrides[:1], "stages=[logits]", *overrides[2:], "logits.verify=true", work=work)
    assert "rollouts/shard-00001.safetensors: this shard is damaged" in message
    code, stderr = attempt(*overrides[:1], "stages=[logits]", *overrides[2:], "logits.repair=true", work=work)
    assert code == 0, stderr
    assert shard.read_bytes() == whole


def test_a_distilled_draft_goes_on_where_it_stood(work, attempt):
    """Without a step that changes it, what comes out is what went in: neither its head nor its ids are chosen anew."""
    first = made(work, "distil") / "draft"
    still = ("optimizer.learning_rate=1e-12", "optimizer.muon_learning_rate=1e-12", "optimizer.weight_decay=0")
    code, stderr = attempt(SMOKE, "stages=[distil]", "draft=existing", f"draft.path={first}", *still, work=work)
    assert code == 0, stderr
    before, after = (load_file(place / "draft.safetensors") for place in (first, made(work, "distil") / "draft"))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name].float(), after[name].float(), atol=1e-6) for name in before)


def test_a_distilled_draft_of_another_target_is_refused(work, refused):
    first = made(work, "distil")
    manifest = json.loads((first / MANIFEST).read_text())
    manifest["identity"]["target"] = "another"
    (first / MANIFEST).write_text(json.dumps(manifest))
    message = refused(SMOKE, "stages=[distil]", f"draft.path={first / 'draft'}", work=work)
    assert "this draft was distilled from the target another, this run's is" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("regime=seeds", "regime.share=0"), "regime.share=0.0: give a share above 0 and up to 1"),
        (("regime=corpus", "corpus=dataset", "corpus.path=p.jsonl"), "corpus.response_column=null: regime=corpus learns from"),
        (("regime=rollouts",), "regime.kind=rollouts: only a draft that has learnt something"),
        (("regime=rollouts", "draft.path=d", "regime.share=1"), "regime.share=1.0: give a share of the batches below 1"),
        (("regime=rollouts", "draft.path=d", "regime.length=0"), "regime.length=0: give a number above 0"),
        (("regime=rollouts", "draft.path=d", "objective=cross_entropy"), "objective.divergence=cross_entropy (hard_weight=0)"),
        (("regime=rollouts", "draft.path=d", "objective.hard_weight=0.5"), "objective.divergence=forward_kl (hard_weight=0.5)"),
        (
            ("regime=rollouts", "draft.path=d", "objective.reference=r", "objective.keep=0.5"),
            "objective.reference=r: positions of rollouts weigh as",
        ),
        (("regime=rollouts", "draft=medusa", "codec=hidden"), "regime.kind=rollouts: Medusa heads read the target's states"),
    ],
)
def test_refusals(overrides, message, refused, tmp_path):
    assert message in refused(SMOKE, *overrides, work=tmp_path)


def test_no_prompt_with_an_answer(work, refused, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Count to {i}.", "answer": ""}) + "\n" for i in range(90)))
    mine = ("corpus=dataset", f"corpus.path={path}", "corpus.response_column=answer", "regime=corpus")
    message = refused(SMOKE, "stages=[corpus,generate]", *mine, work=work)
    assert "regime.kind=corpus: none of 48 training prompts came with an answer" in message


def test_defaults_say_generated():
    assert Config().regime == Regime(kind=Text.generated)
