"""What typical acceptance costs is measured and said: refusals, distances by hand, labels wherever a figure appears."""

import copy
import json
import math
import re
from dataclasses import replace

import pytest
import torch

from data.responses import Request, Response
from pipeline import (
    card,
    charts,
    comparison,
    drafters,
    export,
    flow,
    gate,
    heads,
    held_out,
    lossy,
    page,
    race,
    speculate,
    tables,
)
from pipeline.check import check
from pipeline.choices import Stage, Verification
from pipeline.config import Decoding, Export
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.heads import build
from pipeline.page import Row
from pipeline.statistics import FEWEST
from pipeline.trees import choose, measured
from speculative import Draft, Sampling, Tree, Typical, generate
from speculative.metrics import Acceptance
from speculative.sampling import probabilities
from speculative.tree_choice import TreeCosts
from tests.pipeline.conftest import SMOKE
from tests.pipeline.documents import document
from tests.pipeline.exported import Child, finished, in_this_process, stage_folder
from tests.pipeline.test_card import EXCLUDED
from tests.pipeline.test_config import composed
from tests.speculative.tiny import perturbed, tiny, trimmed

TYPICAL = "decoding.verification=typical"
WITHOUT_EXPORT = "stages=[calibrate,speculate,report]"
LOSSY = Decoding(verification=Verification.typical)
BOUND = {"mean": 0.1234, "low": 0.1, "high": 0.15}
FOUND = {
    "epsilon": 0.09, "delta": 0.3, "total_variation": 0.25, "kl": 0.5, "positions": 1234,
    "at_least": {"plain": {"mean": 0.001, "low": -0.02, "high": 0.02}, "speculative": BOUND},
}  # fmt: skip


# Refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("decoding.typical_epsilon=0",), "decoding.typical_epsilon=0.0: give a number above 0 and up to 1"),
        (("decoding.typical_delta=1.5",), "decoding.typical_delta=1.5: give a number above 0 and up to 1"),
        (("decoding.typical_delta=nan",), "decoding.typical_delta=nan: give"),
        ((TYPICAL,), "decoding.verification=typical: it is lossy, and export.lossless=true lets no lossy measurement pass"),
        (
            (TYPICAL, WITHOUT_EXPORT, "decoding.temperatures=[0.0]"),
            "decoding.verification=typical: at temperature 0 it is the greedy rule, which is exact; give a temperature above 0",
        ),
    ],
)
def test_where_it_means_nothing_or_would_pass_for_exact_it_is_refused(overrides, message):
    with pytest.raises(PipelineError, match=re.escape(message)):
        check(composed(*overrides))


@pytest.mark.parametrize("more", [WITHOUT_EXPORT, "export.lossless=false", "export.gate=false"])
@pytest.mark.parametrize("tree", ["off", "auto", "[3,2,1]"])
def test_who_asks_for_loss_may_have_it_with_chains_and_trees(more, tree):
    check(composed(TYPICAL, more, f"decoding.tree={tree}"))
    check(composed(TYPICAL, more, f"decoding.tree={tree}", "draft=medusa", "codec=hidden"))


@pytest.mark.parametrize("tree", ["auto", "[2]"])
def test_one_head_has_no_tree(tree):
    medusa = ("draft=medusa", "codec=hidden", "draft.heads=1")
    check(composed(*medusa))
    with pytest.raises(PipelineError, match=r"draft\.heads=1: trees are timed two levels deep, which takes two heads"):
        check(composed(*medusa, f"decoding.tree={tree}"))


def test_a_tree_has_no_more_branches_than_the_draft_has_ids():
    check(composed("draft.vocabulary_size=4", "decoding.tree=[4,1]"))
    check(composed("draft.vocabulary_size=0", "decoding.tree=[5,1]"))
    check(composed("draft.vocabulary_size=4", "draft.coverage=0.9", "decoding.tree=[5,1]"))
    with pytest.raises(PipelineError, match=r"decoding.tree=\[5, 1\]: draft.vocabulary_size=4 leaves the draft no more ids"):
        check(composed("draft.vocabulary_size=4", "decoding.tree=[5,1]"))


# What results are made of


def test_results_of_exact_rules_are_those_made_before_there_was_a_lossy_one(tmp_path):
    exact, lossy_one = (Context(composed(SMOKE, *more), tmp_path, tmp_path) for more in ((), (TYPICAL, WITHOUT_EXPORT)))
    exact.__dict__["dtype"] = lossy_one.__dict__["dtype"] = torch.float32
    for module, place in ((speculate, lambda found: found["decoding"]), (drafters, lambda found: found)):
        assert not any(name.startswith("typical") for name in place(module.identity(exact)))
        found = module.identity(lossy_one)
        assert found["decoding"]["verification"] == "typical"
        assert (place(found)["typical_epsilon"], place(found)["typical_delta"]) == (0.09, 0.3)


def test_only_hot_temperatures_are_lossy():
    assert [lossy.ending(LOSSY, t) for t in (0.0, 0.7)] == ["", "_lossy"]
    assert lossy.ending(Decoding(), 0.7) == ""
    assert lossy.tags(Decoding()) == {}
    assert lossy.tags(LOSSY) == {"lossy": "typical acceptance (ε = 0.09, δ = 0.3) at temperature 1"}
    assert set(flow.DECODING) == {Stage.speculate, Stage.report, Stage.export, Stage.drafters}


# Distances


def answers(target, count=3, tokens=10):
    prompts = [(5 + n, 9, 3, 7) for n in range(count)]
    texts = generate(target, None, prompts, max_new_tokens=tokens, sampling=Sampling(), seed=1).tokens
    return [
        Response(Request(n, "test", f"p{n}", "k", 1.0, prompt), tuple(text), False)
        for n, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]


def one_by_one(p, q, vocabulary, rule):
    """Chance, total variation and KL at one position, from lists of numbers."""
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    level = min(rule.epsilon, rule.delta * math.exp(-entropy))
    drafted = dict(zip(vocabulary, q, strict=True))
    stays = [drafted.get(x, 0.0) if p[x] > level else 0.0 for x in range(len(p))]
    law = [s + (1 - sum(stays)) * px for s, px in zip(stays, p, strict=True)]
    kl = sum(a * math.log(a / b) for a, b in zip(law, p, strict=True) if a > 0)
    return sum(stays), sum(abs(a - b) for a, b in zip(law, p, strict=True)) / 2, kl


@pytest.mark.parametrize("kept", [None, [*range(0, 48, 2)]])
def test_held_out_distances_are_those_of_the_law_at_every_position(kept):
    target, rule, sampling = tiny(), Typical(0.2, 0.5), Sampling(0.8)
    draft = Draft(perturbed(target)) if kept is None else Draft(trimmed(kept, seed=1), torch.tensor(kept))
    texts = answers(target)
    [found] = held_out.measure(target, [draft], texts, sampling, "", typical=rule)
    want = []
    for text in texts:
        ids = torch.tensor([[*text.request.prompt, *text.tokens]])
        with torch.inference_mode():
            p, q = (probabilities(model(ids).logits[0, 3:-1], sampling).tolist() for model in (target, draft.model))
        want += [one_by_one(*pair, range(48) if kept is None else kept, rule) for pair in zip(p, q, strict=True)]
    assert [chance for row in found.acceptance for chance in row] == pytest.approx([row[0] for row in want], abs=1e-5)
    assert found.loss["total_variation"] == pytest.approx(sum(row[1] for row in want) / len(want), abs=1e-5)
    assert found.loss["kl"] == pytest.approx(sum(row[2] for row in want) / len(want), abs=1e-4)
    assert found.loss["total_variation"] > 0.01
    assert held_out.measure(target, [draft], texts, sampling, "")[0].loss == {}


def test_held_out_distances_of_heads_are_those_of_the_first():
    target, rule = tiny(), Typical(0.2, 0.5)
    made, texts = build(target, 2, None), answers(target)
    [found] = heads.measure(target, [made], texts, Sampling(), "", typical=rule)
    want, chances = [], []
    for text in texts:
        ids = torch.tensor([[*text.request.prompt, *text.tokens]])
        with torch.inference_mode():
            states = target.base_model(ids).last_hidden_state[0, 3:-1]
            p = probabilities(target(ids).logits[0, 3:-1], Sampling()).tolist()
            q = probabilities(made(states)[:, 0], Sampling()).tolist()
        rows = [one_by_one(a, b, range(48), rule) for a, b in zip(p[1:], q, strict=False)]
        chances += [0.0, *(row[0] for row in rows)]
        want += rows
    assert [chance for row in found.acceptance for chance in row] == pytest.approx(chances, abs=1e-5)
    assert found.loss["total_variation"] == pytest.approx(sum(row[1] for row in want) / len(want), abs=1e-5)
    assert found.loss["kl"] == pytest.approx(sum(row[2] for row in want) / len(want), abs=1e-4)


def test_texts_are_judged_in_their_own_places():
    target, rule, prompt = tiny(), Typical(0.2, 0.5), (5, 9, 3)
    found = lossy.measured(target, prompt, {"a": [4, 7, 7], "b": [1]}, Sampling(0.8), rule)
    values = []
    for place, token in enumerate((4, 7, 7)):
        with torch.inference_mode():
            p = probabilities(target(torch.tensor([[*prompt, *(4, 7, 7)[:place]]])).logits[0, -1], Sampling(0.8)).tolist()
        level = min(0.2, 0.5 * math.exp(sum(x * math.log(x) for x in p if x > 0)))
        values.append((p[token] > level) - sum(x for x in p if x > level))
    assert found["a"] == pytest.approx(sum(values) / 3, abs=1e-5)
    assert set(found) == {"a", "b"}


def test_rates_of_branches_are_measured_by_the_rule_that_is_raced():
    target = tiny(dtype=torch.float64)
    draft, texts = Draft(perturbed(target)), answers(target, 4, 24)
    costs = TreeCosts(0.02, ((1, 0.01), (16, 0.01)), ((0, 1.0), (32, 1.01)))
    exact, lost = (
        choose(target, draft, texts, Sampling(), Decoding(tree=[2, 2], verification=rule, typical_epsilon=0.01), costs, 0)
        for rule in (Verification.token, Verification.typical)
    )
    assert lost.rates != exact.rates
    same = measured(target, draft, texts, Tree.of((2, 2)), Sampling(), 0, verification="typical", typical=Typical(0.01, 0.3))
    assert lost.rates == same


# Labels


def race_row(**more):
    counts = Acceptance(((0, 0), (1, 1)), 3)
    return {
        "id": "a", "kind": "user", "temperature": 1.0, "new_tokens": 3, "draft_tokens": 1, "predicted": 1.0,
        "plain_seconds": 6.0, "plain_decoding_seconds": 5.0, "speculative_seconds": 4.0, "speculative_decoding_seconds": 3.0,
        "acceptance": counts, "phases": {"prefill": 1.0},
    } | more  # fmt: skip


def test_a_race_with_loss_has_its_bounds_by_way():
    rows = [race_row(excess={"plain": 0.0, "speculative": value}) for value in (0.1, 0.3)]
    found = race.summary(rows, seed=0)
    assert found["lossy"]["at_least"]["speculative"] == {"mean": pytest.approx(0.2), "low": 0.1, "high": 0.3}
    assert "excess" not in found["prompts"][0]
    assert "lossy" not in race.summary([race_row()], seed=0)


def test_metrics_have_the_names_that_the_readme_explains():
    more = FOUND | {"at_least": FOUND["at_least"] | {"tree": BOUND}}
    assert lossy.metrics(more, "_at_1") == {
        "lossy/total_variation_at_1": 0.25,
        "lossy/kl_at_1": 0.5,
        "lossy/total_variation_at_least_at_1": 0.1234,
        "lossy/tree_total_variation_at_least_at_1": 0.1234,
    }


def test_the_sentence_names_the_rule_its_distance_and_the_check():
    text = lossy.words(FOUND)
    assert text.startswith("typical acceptance (ε = 0.09, δ = 0.3) does not keep the target's law")
    assert "0.250 from the target's law in total variation, 0.500 nats in KL, over 1,234 positions" in text
    assert text.endswith("at least: speculative 0.123 [0.100, 0.150] (plain, which is exact: 0.001 [-0.020, 0.020])")


def comparison_entry(**more):
    names = ("none", "a")
    row = {
        "kind": "chat",
        "seconds": {"none": 6.0, "a": 3.0},
        "acceptance": dict.fromkeys(names, Acceptance(((0, 0), (1, 1)), 3)),
    }
    facts = [{"name": name, "words": "w", "bytes": 0, "training_seconds": 0.0} for name in names]
    kinds = comparison.summarise([row] * FEWEST, names, 0)
    return {"ways": facts, "kinds": kinds, "compared": 1, "different": None, "left_out": 0, "foreign": ""} | more


def test_the_comparison_of_drafters_says_lossy_in_every_verdict():
    entry = comparison_entry(lossy={"epsilon": 0.09, "delta": 0.3, "at_least": {"none": BOUND, "a": BOUND}})
    details = {"by_temperature": {"1": entry}}
    text = comparison.markdown(details)
    assert "## Drafters at temperature 1 (lossy)" in text
    assert "**Lossy:** typical acceptance" in text
    assert "- chat (lossy): a wins" in text
    assert comparison.verdict_rows(details)[0][0] == "chat T=1 (lossy)"
    named = comparison.metrics(entry, "_lossy")
    assert named["drafters/a/total_variation_at_least_lossy"] == 0.1234
    assert all(name.endswith("_lossy") for name in named)
    exact = comparison.markdown({"by_temperature": {"1": comparison_entry()}})
    assert "ossy" not in exact


def context_with_loss(tmp_path, **settings):
    context = finished(tmp_path, **settings)
    entries = context.parent(Stage.speculate).details["by_temperature"]
    entries["1"] = copy.deepcopy(entries["0"]) | {"lossy": copy.deepcopy(FOUND)}
    return context


def test_the_gate_lets_no_lossy_measurement_count_as_lossless(tmp_path):
    details = context_with_loss(tmp_path).parent(Stage.speculate).details
    found = gate.checks(Export(), details, 1.0)
    [failed] = [check for check in found if not check.passed]
    assert failed.key == "export.lossless"
    with pytest.raises(PipelineError, match=r"number of temperatures decoded by a lossy rule is 1, 1 above export.lossless=0"):
        gate.refuse(found, "gate.json")
    allowed = gate.checks(Export(lossless=False), details, 1.0)
    assert all(check.passed for check in allowed)
    assert [c.figure for c in allowed if c.at == "1"] == [
        "overlap",
        "lower end of the speed ratio (lossy)",
        "number of prompts timed",
    ]
    del details["by_temperature"]["1"]["lossy"]
    assert all(check.passed for check in gate.checks(Export(), details, 1.0))


def test_what_leaves_the_house_says_lossy(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    with pytest.raises(PipelineError, match="decoded by a lossy rule"):
        export.run(context_with_loss(tmp_path / "a"), stage_folder(context_with_loss(tmp_path / "b")), Child())
    context = context_with_loss(tmp_path / "c", lossless=False)
    export.run(context, stage_folder(context), Child())
    place = stage_folder(context) / "draft"
    for name in ("gate.json", "provenance.json"):
        assert json.loads((place / name).read_text())["lossy"]["1"]["total_variation"] == 0.25
    text = (place / "README.md").read_text()
    assert text.count("| 1 (lossy) | 2 |") == 2
    assert text.count("| 0 | 2 |") == 2
    assert "- Temperature 1: typical acceptance" in text
    exact = finished(tmp_path / "d")
    assert "ossy" not in card.model_card(exact, EXCLUDED).replace("lossless", "")
    assert "lossy" not in card.provenance(exact, "run", "result")


def test_the_page_and_its_charts_say_which_draft_was_lossy():
    documents = [document(0.4), document(0.5)]
    documents[1]["by_temperature"]["1"]["lossy"] = FOUND
    rows = [Row(n, f"draft-{n}", "FINISHED", "", one) for n, one in enumerate(documents, start=1)]
    text = page.render("A sweep", rows, "")
    assert "draft 2 at temperature 1: typical acceptance" in text
    assert text.count("draft-2 (lossy)") == 1
    assert "draft-1 (lossy)" not in text
    assert charts._which(page.measured(rows), "1") == "T=1 (lossy: 2)"
    assert charts._which(page.measured(rows), "0") == "T=0"
    assert charts._which(page.measured(rows)[1:], "1") == "T=1 (lossy)"
    assert "ossy" not in page.render("A run", rows[:1], "")


def test_the_table_of_a_run_says_lossy_beside_every_figure():
    interval = {"median": 1.5, "low": 1.2, "high": 1.7}
    agreement = {"forward_kl": 1.0, "overlap": 0.5, "top1": 0.5, "acceptance": 0.5}
    entry = {
        "before": agreement, "after": agreement, "positions": 9, "acceptance_rate": 0.5, "by_position": [0.5],
        "draft_tokens": 2, "tokens_per_round": 1.5, "tokens_per_round_predicted": 1.5, "ratio": interval,
        "predicted": 1.4, "plain_tokens_per_second": 1.0, "speculative_tokens_per_second": 2.0,
    }  # fmt: skip
    details = {
        "by_temperature": {"0": entry, "1": entry | {"lossy": FOUND}},
        "lossless": {"prompts": 6, "different": 0, "oracle_answers": 0, "oracle_different": 0},
    }
    calibrated = {"by_temperature": {temperature: {"break_even_overlap": 0.2} for temperature in ("0", "1")}}
    rows = dict(tables._speed(details, calibrated))
    assert {"speed T=0", "speed T=1 (lossy)", "acceptance T=1 (lossy)", "lossy T=1"} <= set(rows)
    assert not {"speed T=1", "acceptance T=1"} & set(rows)
    assert rows["lossless"].endswith("this says nothing of temperature 1, which was decoded with loss")


def test_an_identity_keeps_the_thresholds_apart():
    one, other = LOSSY, replace(LOSSY, typical_epsilon=0.2)
    assert lossy.thresholds_used(one) != lossy.thresholds_used(other)
    assert lossy.thresholds_used(Decoding(typical_epsilon=0.2)) == {}
