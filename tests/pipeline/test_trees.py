"""The tree of a run: refusals by key, the sizes that are timed, rates counted in decoding, and the smoke run that races it."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from data.responses import Request, Response
from pipeline import calibrate, race, speculate, trees
from pipeline import check as checks
from pipeline.check import check
from pipeline.choices import Stage
from pipeline.config import Decoding
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.heads import build
from pipeline.tables import _tree as words_of
from speculative import Draft, Sampling, Tree, generate
from speculative.cache import UnsupportedModelError
from speculative.metrics import Acceptance, Ranks
from speculative.tree import LARGEST
from speculative.tree_choice import TreeCosts
from tests.pipeline.conftest import SMOKE
from tests.pipeline.test_config import composed
from tests.pipeline.test_medusa_run import newest
from tests.speculative.tiny import perturbed, tiny

GREEDY = Sampling(0.0)
CHEAP = TreeCosts(0.02, ((1, 0.01), (16, 0.01)), ((0, 1.0), (32, 1.01)))
DEAR = TreeCosts(0.02, ((1, 9.0), (16, 9.0)), ((0, 1.0), (32, 9.0)))


def answers(count: int = 3, tokens: int = 24) -> list[Response]:
    """Answers of which only the length counts here."""
    made = (Request(n, "validation", f"p{n}", "user", 0.0, (5 + n, 9, 3, 7)) for n in range(count))
    return [Response(request, (1,) * tokens, False) for request in made]


# Refusals


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decoding.tree=wide", "decoding.tree=wide: give"),
        ("decoding.tree=[]", "decoding.tree=[]: give"),
        ("decoding.tree=[3,0]", "decoding.tree=[3, 0]: give"),
        ("decoding.tree=[3,true]", "decoding.tree=[3, True]: give"),
        ("decoding.tree=3", "decoding.tree=3: give"),
        ("decoding.tree=null", "decoding.tree=None: give"),
        ("decoding.tree=[10,10,10]", "decoding.tree=[10, 10, 10]: it has 1110 nodes, give up to 128"),
    ],
)
def test_what_is_no_tree_is_refused(override, message):
    with pytest.raises(PipelineError, match=re.escape(message)):
        check(composed(override))


@pytest.mark.parametrize("tree", ["auto", "[2,1]"])
@pytest.mark.parametrize("rule", ["block", "match"])
def test_rules_that_need_a_chain_are_refused_by_name(tree, rule):
    check(composed(f"decoding.verification={rule}", "decoding.tree=off"))
    with pytest.raises(PipelineError, match=f"decoding.verification={rule}: the branches of a tree are judged token by token"):
        check(composed(f"decoding.tree={tree}", f"decoding.verification={rule}"))


def test_a_tree_is_not_deeper_than_there_are_heads():
    medusa = ("draft=medusa", "codec=hidden")
    check(composed(*medusa, "decoding.tree=[2,1,1,1]"))
    check(composed("decoding.tree=[2,1,1,1,1]"))
    with pytest.raises(PipelineError, match=r"decoding.tree=\[2, 1, 1, 1, 1\]: draft.heads=4 heads draft no tree deeper"):
        check(composed(*medusa, "decoding.tree=[2,1,1,1,1]"))


def test_the_largest_tree_is_that_of_the_engine():
    assert checks.LARGEST_TREE == LARGEST


def test_more_branches_than_the_draft_has_ids_are_refused():
    with pytest.raises(PipelineError, match=r"decoding.tree=\[100\]: the draft has 48 output ids, give fewer branches"):
        trees.calibrated(tiny(), Draft(tiny(seed=1)), [[1, 2]], GREEDY, Decoding(tree=[100]))


@pytest.mark.parametrize("tree", ["auto", [1], [3]])
def test_one_head_is_too_few_for_trees(tree):
    message = re.escape(
        f"decoding.tree={tree}: trees are timed two levels deep, one Medusa head is too few; give decoding.tree=off"
    )
    with pytest.raises(PipelineError, match=message):
        trees.calibrated(tiny(), build(tiny(), 1, None), [[1, 2]], GREEDY, Decoding(tree=tree))


def test_a_model_that_cannot_branch_is_refused(monkeypatch):
    def refuse(model):
        raise UnsupportedModelError("strange: it cannot verify a tree")

    monkeypatch.setattr(trees, "check_branching", refuse)
    with pytest.raises(PipelineError, match=r"decoding\.tree=auto: strange: it cannot verify a tree; give decoding.tree=off"):
        trees.calibrated(tiny(), Draft(tiny(seed=1)), [[1, 2]], GREEDY, Decoding(tree="auto"))


# What is timed, and what it makes of other results


def test_as_many_nodes_are_timed_as_the_tree_has():
    assert trees.widths(Decoding(tree="auto")) == (1, 2, 4, 8, 16)
    assert trees.widths(Decoding(tree=[1])) == (1,)
    assert trees.widths(Decoding(tree=[2, 1])) == (1, 2)
    assert trees.widths(Decoding(tree=[3, 2, 1])) == (1, 2, 4, 8)
    assert trees.widths(Decoding(tree=[4, 4, 1])) == (1, 2, 4, 8, 16, 32)  # 36 nodes, 16 on a level
    assert trees.widths(Decoding(tree=[20, 1])) == (1, 2, 4, 8, 16, 32)  # 40 nodes, 20 on a level


def test_a_tree_makes_other_results_and_no_tree_leaves_no_trace(tmp_path):
    plain, tree = (Context(composed(SMOKE, *more), tmp_path, tmp_path) for more in ((), ("decoding.tree=auto",)))
    for context in (plain, tree):
        context.__dict__["target"] = SimpleNamespace(fingerprint="t", padding={})
        context.__dict__["dtype"] = torch.float32
    assert "tree" not in speculate.identity(plain)["decoding"]
    assert speculate.identity(tree)["decoding"]["tree"] == "auto"
    assert calibrate.identity(tree) == calibrate.identity(plain) | {"tree_widths": [1, 2, 4, 8, 16]}
    assert "tree_widths" not in calibrate.identity(plain)


# Rates and the choice


def test_counts_are_added_by_depth_and_rank():
    one, two = Ranks(((4, 4), (2, 0)), ((2, 1), (1, 0))), Ranks(((6, 2), (4, 1)), ((3, 0), (1, 1)))
    assert trees._added(one, two) == Ranks(((10, 6), (6, 1)), ((5, 1), (2, 1)))


def test_the_measuring_tree_is_as_deep_as_chains_or_heads():
    draft, heads = Draft(tiny()), build(tiny(), 2, None)
    assert trees.wide(draft, Decoding(longest_draft=5)) == Tree.of((4, 2, 2, 1, 1))
    assert trees.wide(draft, Decoding(longest_draft=1)) == Tree.of((4,))
    assert trees.wide(heads, Decoding(longest_draft=5)) == Tree.of((4, 2))
    assert trees.wide(build(tiny(), 2, torch.tensor([3, 5])), Decoding()) == Tree.of((2, 2))


@pytest.mark.parametrize(("longest", "depth", "nodes"), [(9, 9, 124), (10, 9, 124), (40, 9, 124)])
def test_the_measuring_tree_is_never_larger_than_a_tree_may_be(longest, depth, nodes):
    """Four branches, eight, sixteen, then sixteen at each depth: 28 + 16 · 6 = 124 nodes, one level more would be 140."""
    wide = trees.wide(Draft(tiny()), Decoding(longest_draft=longest))
    assert (wide.depth, wide.size) == (depth, nodes)
    assert wide.size <= LARGEST


def test_rates_are_those_of_rounds_counted_by_hand():
    """An independent count for a tree of one level: one forward tells the draft's best three anywhere in the text."""
    target = tiny(dtype=torch.float64)
    draft, texts, kept, tried = perturbed(target), answers(tokens=24), [0, 0, 0], 0
    for text in texts:
        prompt = list(text.request.prompt)
        written = generate(target, None, [prompt], max_new_tokens=24).tokens[0]
        with torch.no_grad():
            best = draft(torch.tensor([prompt + written])).logits[0].topk(3).indices.tolist()
        place = 0
        while place < 23:  # the last token is the target's own
            tried += 1
            branches = best[len(prompt) + place - 1]
            if written[place] in branches:
                kept[branches.index(written[place])] += 1
                place += 1
            place += 1
    rates = trees.measured(target, Draft(draft), texts, Tree.of((3,)), GREEDY, seed=0)
    assert rates == [[pytest.approx(count / tried) for count in kept]]
    assert 0 < sum(kept) < tried


def test_a_draft_that_equals_its_target_is_drafted_as_deep_as_was_measured():
    target = tiny(dtype=torch.float64)
    choice = trees.choose(target, Draft(target), answers(), GREEDY, Decoding(tree="auto", longest_draft=3), CHEAP, 0)
    assert choice.recommended
    assert choice.tree.depth == 3
    assert choice.rates[0][0] == 1.0
    assert choice.predicted == pytest.approx(choice.tokens_per_round / CHEAP.round(choice.tree))
    assert choice.tokens_per_round == pytest.approx(4.0)


def test_where_plain_decoding_should_win_the_smallest_tree_is_raced_and_said_to_lose():
    target = tiny(dtype=torch.float64)
    choice = trees.choose(target, Draft(target), answers(), GREEDY, Decoding(tree="auto", longest_draft=2), DEAR, 0)
    assert (choice.recommended, choice.tree) == (False, Tree.of((1,)))
    assert choice.predicted < 1
    assert choice.words == "a chain of 1 node (1 by depth)"


def test_a_given_tree_is_taken_whatever_it_costs():
    target = tiny(dtype=torch.float64)
    choice = trees.choose(target, Draft(target), answers(), GREEDY, Decoding(tree=[2, 2]), DEAR, 0)
    assert choice.tree == Tree.of((2, 2))
    assert not choice.recommended
    assert choice.words == "a tree of 6 nodes (2 + 4 by depth)"


# What the race makes of it


def row(tree_seconds: float) -> dict:
    counts = Acceptance(((0, 0), (1, 1)), 3)
    return {
        "id": "a", "kind": "user", "temperature": 0.0, "new_tokens": 3, "draft_tokens": 1, "predicted": 1.0,
        "plain_seconds": 6.0, "plain_decoding_seconds": 5.0, "speculative_seconds": 4.0, "speculative_decoding_seconds": 3.0,
        "tree_seconds": tree_seconds, "tree_decoding_seconds": 2.0, "acceptance": counts, "tree_acceptance": counts,
        "phases": {"prefill": 1.0},
    }  # fmt: skip


def test_the_tree_has_ratios_to_plain_decoding_and_to_the_chain():
    found = race.summary([row(2.0), row(3.0), row(4.0)], seed=0)
    named = race.metrics(found)
    assert named["speed/ratio"] == 1.5
    assert named["tree/ratio"] == 2.0  # 6/3, the median of 3, 2 and 1.5
    assert (named["tree/ratio_low"], named["tree/ratio_high"]) == (1.5, 3.0)
    assert named["tree/ratio_decoding"] == 2.5
    assert named["tree/ratio_chain"] == pytest.approx(4 / 3)
    assert named["tree/tokens_per_round"] == 1.5
    assert "tree_acceptance" not in found["prompts"][0]
    assert not any(name.startswith("tree") for name in race.metrics({k: v for k, v in found.items() if k != "tree"}))


def test_the_table_says_where_a_tree_was_expected_to_lose():
    interval = {"median": 0.9, "low": 0.8, "high": 1.0}
    tree = {
        "shape": "a chain of 1 node (1 by depth)", "predicted": 0.95, "tokens_per_round_predicted": 1.5,
        "tokens_per_round": 1.4, "recommended": False,
    } | dict.fromkeys(("ratio", "ratio_decoding", "ratio_chain"), interval)  # fmt: skip
    assert words_of(tree).endswith("plain decoding was expected to be faster")
    assert "0.90× [0.80, 1.00], predicted 0.95×" in words_of(tree)
    assert "expected to be faster" not in words_of(tree | {"recommended": True})


@pytest.mark.parametrize(
    ("tree", "ends", "timed"), [("auto", [""], 32), pytest.param("[2,1]", ["", "_at_1"], 4, marks=pytest.mark.slow)]
)
def test_the_smoke_run_races_a_tree(work, attempt, tree, ends, timed):
    temperatures = "[0.0,1.0]" if len(ends) == 2 else "[0.0]"
    code, stderr = attempt(SMOKE, f"decoding.tree={tree}", f"decoding.temperatures={temperatures}", "decoding.baselines=false",
                           "stages=[calibrate,speculate,report]", work=work)  # fmt: skip
    assert code == 0, stderr
    made = {name: json.loads((newest(work, name) / "manifest.json").read_text()) for name in ("calibrate", "speculate")}
    metrics, details = made["speculate"]["metrics"], made["speculate"]["details"]
    for end in ends:
        assert math.isfinite(metrics[f"tree/ratio_predicted{end}"])
        assert metrics[f"tree/ratio_low{end}"] <= metrics[f"tree/ratio{end}"] <= metrics[f"tree/ratio_high{end}"]
    assert details["lossless"]["different"] == 0
    assert details["lossless"]["trees"] >= 1
    if tree != "auto":
        assert details["by_temperature"]["1"]["tree"]["parents"] == list(Tree.of((2, 1)).parents)
    assert [size for size, _ in made["calibrate"]["details"]["by_temperature"]["0"]["tree_costs"]["verify"]][-1] == timed
    report = newest(work, Stage.report.name)
    assert "| tree T=0 |" in (report / "report.md").read_text()
    assert "by depth)" in (report / "report.html").read_text()
