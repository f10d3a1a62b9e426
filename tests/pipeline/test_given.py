"""What is brought to the comparison of drafters from outside: heads of another run, and a file of prompts by category."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

from data.responses import Request, Response
from pipeline import drafter_prompts
from pipeline.comparison import ALL
from pipeline.config import Drafters
from pipeline.drafter_prompts import CHAT, CODE, gather, of_file, room
from pipeline.errors import PipelineError
from pipeline.given_heads import GivenHeads
from pipeline.tiny import byte_tokenizer
from speculative import medusa
from tests.pipeline.conftest import SMOKE


def heads(root, target="t", count=2, generate="g", corpus=None):
    """A result of the stage distil as its small files tell it, and, with ``corpus``, that of the stage generate."""
    folder = root / "distil" / "abc"
    (folder / "draft").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"identity": {"parents": {"logits": "l", "generate": generate}}}))
    config = {"kind": "medusa", "target": target, "heads": count, "width": 8, "outputs": 16}
    (folder / "draft" / medusa.CONFIG).write_text(json.dumps(config))
    if corpus is not None:
        (root / "generate" / generate).mkdir(parents=True)
        made = {"identity": {"parents": {"corpus": corpus}}}
        (root / "generate" / generate / "manifest.json").write_text(json.dumps(made))
    return folder


# Heads


@pytest.mark.parametrize("tree", ["off", "auto", [2, 1]])
def test_heads_of_this_target_are_taken(tmp_path, tree):
    GivenHeads(str(heads(tmp_path))).check("t", tree)


@pytest.mark.parametrize(
    ("made", "tree", "message"),
    [
        ({"target": "other"}, "off", "they belong to the target other, this run's is t; name heads that were trained for it"),
        ({"count": 1}, "auto", "decoding.tree=auto: trees are timed two levels deep, drafters.heads has 1 head"),
        ({"count": 1}, [3], "decoding.tree=[3]: trees are timed two levels deep, drafters.heads has 1 head"),
        ({}, [2, 1, 1], "decoding.tree=[2, 1, 1]: the 2 heads of drafters.heads draft no tree deeper than that"),
    ],
)
def test_heads_that_cannot_draft_here_are_refused_by_name(tmp_path, made, tree, message):
    with pytest.raises(PipelineError, match=re.escape(message)):
        GivenHeads(str(heads(tmp_path, **made))).check("t", tree)


def test_one_head_is_enough_for_chains(tmp_path):
    GivenHeads(str(heads(tmp_path, count=1))).check("t", "off")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"generate": "g"}, ""),  # the very responses of this run
        ({"generate": "h", "corpus": "c"}, ""),  # other responses to the same prompts, divided alike
        ({"generate": "h", "corpus": "d"}, "The Medusa heads learnt from corpus d, where this run has c: they may have been"),
        ({"generate": "h"}, "The Medusa heads learnt from prompts that are not known here: they may have been trained on some"),
    ],
)
def test_heads_that_may_have_seen_the_test_prompts_are_said_to(tmp_path, made, said):
    found = GivenHeads(str(heads(tmp_path, **made))).foreign("g", "c")
    assert found.startswith(said)
    assert bool(found) is bool(said)


def test_what_cannot_be_compared_with_is_refused_before_anything_runs(tmp_path, refused):
    """Nothing was made before, and nothing is made."""
    path = tmp_path / "bench.jsonl"
    path.write_text(json.dumps({"turns": ["Say it."], "category": "qa"}) + "\n")
    stages = "stages=[corpus,generate,logits,distil,drafters]"
    for override, message in (
        (f"drafters.heads={heads(tmp_path)}", "they belong to the target t"),
        ("drafters.heads=nowhere", "drafters.heads=nowhere: give a result folder"),
        (f"drafters.path={path} drafters.category=kind", "drafters.category=kind is not a column of bench.jsonl"),
        (f"drafters.path={path} drafters.max_prompt_tokens=3", "drafters.max_prompt_tokens=3: no prompt of bench.jsonl"),
        ("decoding.max_new_tokens=100000", "decoding.max_new_tokens=100000: the context holds "),
    ):
        assert message in refused(SMOKE, stages, *override.split(), work=tmp_path / "work")
    assert not list((tmp_path / "work").glob("artifacts/*/*/*"))


# Prompts


def test_the_room_for_a_prompt_is_what_the_answer_leaves():
    assert room(100, 80) == 20
    assert room(None, 80) == sys.maxsize
    message = r"decoding\.max_new_tokens=80: the context holds 80 positions, which leaves none for a prompt; lower it"
    with pytest.raises(PipelineError, match=message):
        room(80, 80)


def context(**settings):
    config = SimpleNamespace(drafters=Drafters(**settings), target=SimpleNamespace(system_prompt=None))
    return SimpleNamespace(config=config, target=SimpleNamespace(tokenizer=byte_tokenizer))


def test_prompts_that_do_not_fit_the_context_are_passed_over(monkeypatch, tmp_path):
    """Chat prompts of 4 … 12 tokens, of which 4 … 9 fit; code keeps its last nine."""
    code = "def f(): return 12345"
    monkeypatch.setattr(drafter_prompts, "_code", lambda context: [code])
    monkeypatch.setattr(drafter_prompts, "prompt_ids", lambda tokenizer, text, system: [7] * len(text))
    answers = [Response(Request(n, "test", f"p{n}", "user", 0.0, (5,) * n), (1,), False) for n in range(12, 3, -1)]
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps({"turns": [text], "category": "qa"}) + "\n" for text in ("short", "much too long")))
    cases = gather(context(path=str(path)), answers, 9)
    assert [len(case.prompt) for case in cases if case.kind == CHAT] == [9, 8, 7, 6, 5, 4]
    assert [case.prompt for case in cases if case.kind == CODE] == [tuple(byte_tokenizer()(code)["input_ids"][-9:])]
    assert len([case for case in cases if case.kind == "qa"]) == 1
    assert max(len(case.prompt) for case in cases) <= 9


def test_where_no_prompt_fits_that_is_said(monkeypatch):
    monkeypatch.setattr(drafter_prompts, "_code", lambda context: [])
    answers = [Response(Request(0, "test", "p", "user", 0.0, (5,) * 10), (1,), False)]
    with pytest.raises(
        PipelineError, match=r"drafters\.path=None: no prompt has 9 tokens or fewer; name a file of shorter ones"
    ):
        gather(context(), answers, 9)


def test_no_category_takes_the_place_of_another_kind(tmp_path):
    names = [CHAT, CODE, ALL, "qa"]
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"Say {name}."], "category": name}) + "\n" for name in names))
    found = of_file(Drafters(path=str(path)), byte_tokenizer(), None, 1000)
    assert list(found) == [f"{CHAT} (of the file)", f"{CODE} (of the file)", f"{ALL} (of the file)", "qa"]
