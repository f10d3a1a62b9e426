"""``python -m pipeline advise`` answers for two models, for a target alone, and for a draft that was distilled."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from data.prompts import prompt
from pipeline import candidates, hardware, prospects, record, sample, tiny, tracking
from pipeline import draft as drafts
from pipeline.config import Draft as DraftConfig
from pipeline.config import Target, Tracking
from pipeline.target import resolve
from speculative import Draft
from speculative.cost import Costs
from tests.pipeline.conftest import exit_code
from tests.pipeline.documents import document

TEXTS = [prompt(f"source {n}", "user", f"Say {n} in {n % 7} words.") for n in range(20)]
FREE = Costs(plain_seconds=0.01, draft=0.0, verify=(1.0, 1.0, 1.0), other=(0.0, 0.0, 0.0))
EVEN = dict.fromkeys((1, 2, 4, 96), 1.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return resolve(Target(path="random:tiny"), tmp_path_factory.mktemp("advise"), 0)


@pytest.fixture(scope="module")
def target(files):
    return files.load(torch.float32)


@pytest.fixture(scope="module")
def answers(files, target):
    return [answer for t in (0.0, 1.0) for answer in sample.write(target, files.tokenizer(), TEXTS, 4, 12, t)]


@pytest.fixture
def free(monkeypatch):
    """Machine costs that can be worked with by hand: drafting costs nothing, verifying a plain step."""
    monkeypatch.setattr(sample, "calibrated", lambda *_: FREE)
    monkeypatch.setattr(sample, "forwards", lambda *_: EVEN)


@pytest.fixture
def cheap(free, monkeypatch):
    """Costs at which some shape pays, whatever machine this is."""
    monkeypatch.setattr(sample, "calibrated", lambda *_: replace(FREE, draft=0.3))


@pytest.fixture
def ask(monkeypatch, capsys, tmp_path):
    """Run ``draftsmith advise``: gives exit code, what it printed, what it complained of."""
    monkeypatch.setattr(hardware, "bfloat16_gain", lambda: 1.0)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftsmith", "advise", f"--work={tmp_path}", *arguments])
        capsys.readouterr()
        return exit_code(), *capsys.readouterr()

    return run


@pytest.fixture
def small(tmp_path) -> list[str]:
    """A few prompts and short answers."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p.text}) + "\n" for p in TEXTS))
    return [f"--prompts={path}", "--sample=3", "--tokens=8", "--longest=2", "--batches", "1", "4"]


def test_the_sample_is_what_the_target_writes(answers):
    assert [answer.request.temperature for answer in answers] == [0.0] * 4 + [1.0] * 4
    assert all(0 < len(answer.tokens) <= 12 for answer in answers)
    assert len({answer.request.prompt_id for answer in answers}) == 4


def test_a_target_that_drafts_for_itself_agrees_with_itself(free, target, answers):
    """Every draft is accepted: K = 2 yields three tokens a round but at the ends of texts, at one step each."""
    rows = prospects.pair(target, Draft(target), answers, 2, [1, 32])
    assert [(row["temperature"], row["batch"]) for row in rows] == [(0.0, 1), (0.0, 32), (1.0, 1), (1.0, 32)]
    for row in rows:
        texts = [a for a in answers if a.request.temperature == row["temperature"]]
        rounds = sum(-(-len(text.tokens) // 3) for text in texts)
        tokens = sum(len(text.tokens) for text in texts)
        assert row["overlap"] == pytest.approx(1.0, abs=1e-4)
        assert (row["draft_tokens"], row["worth_it"]) == (2, True)
        assert row["tokens_per_round"] == pytest.approx(tokens / rounds, rel=1e-3)
        assert row["ratio_predicted"] == pytest.approx(tokens / rounds, rel=1e-3)


def test_a_draft_that_costs_as_much_as_the_target_is_not_worth_it(free, monkeypatch, target, answers):
    monkeypatch.setattr(sample, "calibrated", lambda *_: replace(FREE, draft=1.0))
    rows = prospects.pair(target, Draft(target), answers, 2, [1])
    assert not any(row["worth_it"] for row in rows)
    assert all(row["ratio_predicted"] <= 1 for row in rows)


def test_two_forwards_over_the_sample_suffice(free, monkeypatch, target, answers):
    calls = []
    forward = type(target).forward
    monkeypatch.setattr(type(target), "forward", lambda self, *a, **k: calls.append(1) or forward(self, *a, **k))
    prospects.pair(target, Draft(target), answers, 2, [1, 8, 32])
    assert len(calls) == 2 * len(answers)


def test_the_mean_law_is_that_of_all_positions(target, answers):
    law = sample.mean_law(target, answers)
    assert law.shape == (target.config.vocab_size,)
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    [first] = {tuple(sample.mean_law(target, answers[:1]).tolist())}
    with torch.inference_mode():
        ids = torch.tensor([answers[0].request.prompt + answers[0].tokens])
        own = target(input_ids=ids).logits[0, len(answers[0].request.prompt) - 1 : -1].softmax(-1).mean(0)
    assert torch.allclose(torch.tensor(first), own, atol=1e-5)


def found_by(files, target, answers, batches=(1, 32), overlap=0.45):
    return candidates.find(target, files.load(torch.float32), answers, 2, list(batches), overlap)


def test_candidates_of_more_ids_leave_more_and_cost_more(free, monkeypatch, files, target, answers):
    monkeypatch.setattr(sample, "calibrated", lambda *_: replace(FREE, draft=0.3))
    size = target.config.vocab_size
    found = {(one.layers, one.vocabulary): one for one in found_by(files, target, answers)}
    assert found.keys() == {(layers, ids) for layers in (1, 2) for ids in (size // 4, size // 2, size)}
    for layers in (1, 2):
        parts = [found[layers, ids] for ids in (size // 4, size // 2, size)]
        assert parts[0].ceiling < parts[1].ceiling < parts[2].ceiling == pytest.approx(1, abs=1e-4)
        assert parts[0].cost < parts[1].cost < parts[2].cost
    assert found[2, size // 2].cost == pytest.approx(0.3), "the one that was timed"
    assert found[2, size // 2].to_break_even(1) == pytest.approx(0.3, abs=2e-4), "1 + a over 1 + c at K = 1"


def test_the_first_candidate_is_as_deep_as_the_timed_one_and_the_fastest_of_these(free, monkeypatch, files, target, answers):
    """One layer less is not promised the same overlap: it is told which overlap makes it as fast."""
    monkeypatch.setattr(sample, "calibrated", lambda *_: replace(FREE, draft=0.3))
    first, *others = found_by(files, target, answers, overlap=0.5)
    assert first.layers == 2
    assert all(first.best[1][1] >= one.best[1][1] for one in others if one.layers == 2)
    assert first.to_match == pytest.approx(0.5 * first.ceiling, abs=1e-3)
    for one in others:
        assert (one.to_match < first.to_match) == (one.cost < first.cost), "what costs less need agree less"


def test_candidates_that_cannot_win_say_from_where_on_they_would(free, monkeypatch, files, target, answers):
    monkeypatch.setattr(sample, "calibrated", lambda *_: replace(FREE, draft=0.5))
    first, *_ = found_by(files, target, answers, overlap=0.1)
    assert first.best == {1: (0, 1.0), 32: (0, 1.0)}
    assert 0.1 < first.to_break_even(1) < 1


def test_ids_are_chosen_on_other_prompts_than_they_are_judged_on(monkeypatch, target, answers):
    seen = []
    monkeypatch.setattr(sample, "mean_law", lambda _, texts: seen.append({a.request.key for a in texts}) or torch.ones(3))
    candidates._laws(target, answers)
    chosen, judged = seen
    assert chosen.isdisjoint(judged)
    assert chosen | judged == {answer.request.key for answer in answers}


def test_what_a_candidate_reads_is_what_a_draft_of_that_shape_reads(free, files, target, answers):
    for one in found_by(files, target, answers):
        built = drafts.build(
            files.load(torch.float32), DraftConfig(layers=list(range(one.layers))), torch.arange(one.vocabulary)
        )
        assert one.read_per_step == drafts.shape(built).read_per_step


def test_forwards_are_timed_up_to_the_most(target):
    times = sample.forwards(target, 12, "forwards")
    assert list(times) == [1, 2, 4, 8, 12]
    assert all(seconds > 0 for seconds in times.values())


def test_two_models_get_a_table(ask, small, files):
    code, out, err = ask(f"--target={files.folder}", f"--draft={files.folder}", *small)
    assert code == 0, err
    assert all(word in out for word in ("overlap", "tokens a round", "predicted ratio", "worth it"))
    assert out.count("1.000") == 4, "the target agrees with itself, at two temperatures and two batches"


def test_a_target_alone_gets_shapes_to_try_and_the_command(cheap, ask, small, files):
    code, out, err = ask(f"--target={files.folder}", *small)
    assert code == 0, err
    assert "not known before it is distilled" in out
    assert "python -m pipeline 'draft.layers=[0" in out
    assert out.count("to match") == 2, "said what it is, and a column"
    assert "it breaks even at an overlap of" in out


def job(work, made: dict | None, name: str) -> None:
    with tracking.execution(Tracking(), work, name, {}) as run:
        if made is not None:
            run.text(json.dumps(made), record.FILE)


def learnt(ceiling: float, scale: float, epochs: float) -> dict:
    """A document whose overlap is ceiling − scale / √tokens, of 600 steps over 100,000 positions."""
    made = document(0.5)
    tokens = {step: (step + 1) / 600 * epochs * 100_000 for step in range(99, 600, 100)}
    made["curves"] = {"validation-1/overlap": [(step, ceiling - scale * count**-0.5) for step, count in tokens.items()]}
    made["training"]["epochs"] = epochs
    return made


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (learnt(0.6, 20, 1.5), "more steps: raise trainer.max_steps (twice the tokens: overlap +0.015; the curve ends at 0.60"),
        (learnt(0.6, 20, 3.0), "more data: raise corpus.train"),
        (learnt(0.4, 1, 2.0), "capacity: more layers or a larger vocabulary; more steps would not help"),
    ],
    ids=["steps", "data", "capacity"],
)
def test_a_distilled_draft_is_told_what_it_lacks(ask, tmp_path, made, words):
    job(tmp_path, made, "the draft")
    code, out, err = ask("--run=last")
    assert code == 0, err
    assert "the draft: " in out
    assert words in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sample=1"], "--sample=1: give a number ≥ 2"),
        (["--batches", "0"], "--batches=0: give numbers ≥ 1"),
        (["--temperatures", "1", "-0.5"], "--temperatures=-0.5: give numbers ≥ 0"),
        (["--overlap=1.5"], "--overlap=1.5: give a share above 0 and up to 1"),
        (["--draft=x", "--run=last"], "not allowed with argument --draft"),
        (["--target=/nowhere"], "draftsmith: --target=/nowhere: no such folder"),
        (["--prompts=nowhere.jsonl"], "draftsmith: --prompts=nowhere.jsonl does not exist"),
        (["--run=last"], "no store there; give paths.work of the run, or --uri\n"),
        (["--run=last", "--uri=http://127.0.0.1:1"], "--uri=http://127.0.0.1:1: no server answers there; start it, or correct"),
    ],
)
def test_bad_options_are_named(ask, arguments, words):
    code, _, err = ask(*arguments)
    assert code == 2
    assert words in err


def test_drafts_that_are_none_are_refused(ask, tmp_path, small, files):
    code, _, err = ask(f"--target={files.folder}", "--draft=nowhere", *small)
    assert code == 2
    assert "draftsmith: --draft=nowhere: no model folder" in err
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "medusa.json").touch()
    code, _, err = ask(f"--target={files.folder}", f"--draft={tmp_path / 'heads'}", *small)
    assert code == 2
    assert f"draftsmith: --draft={tmp_path / 'heads'}: these are Medusa heads" in err


def test_a_run_that_tells_nothing_is_refused(ask, tmp_path):
    job(tmp_path, None, "unmeasured")
    code, _, err = ask("--run=last")
    assert code == 2
    assert "draftsmith: --run=last: no draft of it was measured" in err
    short = learnt(0.6, 20, 1.0)
    short["curves"] = {name: points[:3] for name, points in short["curves"].items()}
    job(tmp_path, short, "short")
    code, _, err = ask("--run=last")
    assert code == 2
    assert "3 validations tell no curve, 4 may; distil with a smaller trainer.validate_every" in err


def test_a_draft_of_other_ids_is_refused(ask, tmp_path, small, files):
    tiny.make(tmp_path / "other", seed=1)
    config = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocab = config["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(config))
    code, _, err = ask(f"--target={files.folder}", f"--draft={tmp_path / 'other'}", *small)
    assert code == 2
    assert "its tokenizer is not the target's" in err


def test_jobs_of_a_sweep_that_tell_no_curve_say_why_and_the_others_are_answered(ask, tmp_path):
    run = tracking.open_sweep(Tracking(), tmp_path, "sweep", "command", "token")
    short, untouched = learnt(0.6, 20, 1.0), learnt(0.6, 20, 1.0)
    untouched["training"]["epochs"] = 0.0
    short["curves"] = {name: points[:1] for name, points in short["curves"].items()}
    for place, made in enumerate([learnt(0.6, 20, 1.5), short, untouched, None]):
        with tracking.execution(Tracking(), tmp_path, f"job {place}", {}, "token") as one:
            one.tags({"overrides": f"stages=[distil] trainer.max_steps={place}"})
            if made is not None:
                one.text(json.dumps(made), record.FILE)
    code, out, err = ask(f"--run={run.run_id}")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("trainer.max_steps=0: more steps: raise trainer.max_steps (")
    assert lines[1] == "trainer.max_steps=1: 1 validations tell no curve, 4 may; distil with a smaller trainer.validate_every"
    assert lines[2] == "trainer.max_steps=2: it was measured as it is, nothing trained it here"
    assert lines[3] == "trainer.max_steps=3: not measured (FINISHED)"


def test_a_draft_is_found_in_the_folder_of_its_result_too(ask, tmp_path, small, files, target):
    drafts.save(drafts.build(target, DraftConfig(layers=[0]), torch.arange(100)), tmp_path / "result" / "draft")
    tables = [
        ask(f"--target={files.folder}", f"--draft={tmp_path / place}", "--temperatures", "0", *small)
        for place in ("result", "result/draft")
    ]
    assert [code for code, *_ in tables] == [0, 0], tables
    overlaps = [out.split("│")[3] for _, out, _ in tables]
    assert overlaps[0] == overlaps[1]


def test_a_draft_of_another_target_or_a_damaged_one_is_refused(ask, tmp_path, small, files, target):
    folder = tmp_path / "draft-of-another"
    made = drafts.build(target, DraftConfig(layers=[0]), torch.arange(100))
    drafts.save(Draft(made.model, made.vocabulary + target.config.vocab_size), folder)
    code, _, err = ask(f"--target={files.folder}", f"--draft={folder}", *small)
    assert code == 2
    assert f"--draft={folder}: it drafts ids up to {target.config.vocab_size + 99}, the target has" in err
    (folder / "draft.safetensors").write_bytes(b"\0" * 40)
    code, _, err = ask(f"--target={files.folder}", f"--draft={folder}", *small)
    assert code == 2
    assert f"--draft={folder}: damaged (" in err


def test_the_command_is_for_the_target_and_the_prompts_that_were_asked_about(cheap, ask, tmp_path, small, files):
    code, out, err = ask(f"--target={files.folder}", *small)
    assert code == 0, err
    command = out.splitlines()[-1]
    for part in (f"target.path={files.folder}", "target.sha256=null", f"corpus.path={tmp_path / 'prompts.jsonl'}"):
        assert part in command
    assert f"paths.work={tmp_path}" in command


def test_where_no_draft_can_win_none_is_named(ask, monkeypatch, small, files):
    monkeypatch.setattr(sample, "calibrated", lambda *_: replace(FREE, draft=9.0, verify=(1.0, 9.0, 9.0)))
    code, out, err = ask(f"--target={files.folder}", *small)
    assert code == 0, err
    assert out.splitlines()[-1] == "none of these pays on this machine, however well it agrees"
    assert "python -m pipeline" not in out


def test_an_interrupt_ends_without_a_traceback(ask, monkeypatch, small, files):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "write", interrupted)
    assert ask(f"--target={files.folder}", *small) == (130, "", "draftsmith: interrupted\n")


def test_a_folder_that_cannot_be_made_is_named(ask, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = ask(f"--work={tmp_path / 'file' / 'work'}")
    assert code == 2
    assert f"--work={tmp_path / 'file' / 'work'}: " in err
    assert "choose a folder that can be written" in err
