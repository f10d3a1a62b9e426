"""The comparison of drafters: figures worked by hand, settings, refusals by key, and a whole run on tiny models."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from data.responses import Request, Response
from pipeline import comparison, contestants, drafter_prompts, effort
from pipeline.check import check
from pipeline.comparison import ALL, PLAIN
from pipeline.config import Decoding
from pipeline.contestants import Trained, Way, best_length, ways
from pipeline.drafter_prompts import CHAT, CODE, CONVERSATION, MT_BENCH, Case
from pipeline.errors import PipelineError
from pipeline.heads import build
from pipeline.statistics import FEWEST
from speculative import Draft, PromptLookup, Sampling
from speculative.cost import Costs
from speculative.metrics import Acceptance
from tests.pipeline.conftest import SMOKE
from tests.pipeline.test_config import composed
from tests.pipeline.test_medusa_run import MEDUSA, newest
from tests.speculative.tiny import perturbed, tiny

GREEDY = Sampling(0.0)
ONE = Acceptance(((0, 0), (1, 1)), 3)  # two rounds, three tokens


def row(kind: str, plain: float, **seconds: float) -> dict:
    names = (PLAIN, *seconds)
    return {"kind": kind, "seconds": {PLAIN: plain} | seconds, "acceptance": dict.fromkeys(names, ONE)}


# Figures and sentences


def test_ratios_are_medians_over_the_prompts_of_a_kind():
    rows = [
        row("chat", 6.0, a=3.0, b=4.0),
        row("chat", 6.0, a=2.0, b=4.0),
        row("chat", 6.0, a=4.0, b=4.0),
        row("qa", 1.0, a=2.0, b=1.0),
    ]
    found = comparison.summarise(rows, (PLAIN, "a", "b"), seed=0)
    assert list(found) == ["chat", "qa", ALL]
    assert found["chat"]["ways"]["a"]["ratio"] == {"median": 2.0, "low": 1.5, "high": 3.0}
    assert found["chat"]["ways"][PLAIN]["ratio"]["median"] == 1.0
    assert found["chat"]["ways"]["b"]["tokens_per_round"] == 1.5
    assert (found["chat"]["best"], found["chat"]["next"]) == ("a", "b")
    assert found["chat"]["margin"]["median"] == pytest.approx(4 / 3)
    assert found["qa"]["best"] == "b"
    assert found[ALL]["prompts"] == 4


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        ((2.0, 2.0), (4.0, 5.0), "a wins, 3.00 [3.00, 3.00]"),
        ((4.0, 4.0), (3.9, 5.0), "a leads, 1.50 [1.50, 1.50], but is not shown to be faster than b"),
        ((7.0, 5.0), (8.0, 8.0), "no drafter is shown to beat plain decoding; a comes nearest, 1.03 [0.86, 1.20]"),
    ],
)
def test_who_wins_is_said_only_when_it_is_shown(a, b, sentence):
    rows = [row("chat", 6.0, a=x, b=y) for x, y in zip(a, b, strict=True)] * 3
    assert comparison.verdict(comparison.summarise(rows, (PLAIN, "a", "b"), seed=0)["chat"]) == sentence


@pytest.mark.parametrize("prompts", [1, 4, 5])
def test_few_prompts_let_nobody_win(prompts):
    found = comparison.summarise([row("chat", 6.0, a=2.0, b=4.0)] * prompts, (PLAIN, "a", "b"), seed=0)["chat"]
    assert comparison.verdict(found) == f"too few prompts to tell ({prompts}; it takes 6); a comes first, 3.00 [3.00, 3.00]"


def test_of_six_prompts_the_range_holds_the_median_and_of_five_it_may_not():
    """2 · 2^−n is the chance that all values lie on one side of the median."""
    assert 2 * 0.5**FEWEST < 0.05 < 2 * 0.5 ** (FEWEST - 1)


def test_the_table_has_a_line_for_each_way_and_a_column_for_each_kind():
    ways_of = [
        {"name": PLAIN, "words": "plain decoding", "bytes": 0, "training_seconds": 0.0},
        {"name": "a", "words": "K = 2 | 3", "bytes": 3 * 2**20, "training_seconds": 600.0},
    ]
    rows = [row("chat", 6.0, a=3.0), row("qa", 6.0, a=4.0)]
    entry = {
        "ways": ways_of,
        "kinds": comparison.summarise(rows, (PLAIN, "a"), 0),
        "compared": 2,
        "different": 0,
        "left_out": 3,
        "foreign": "Beware.",
    }
    header, plain, drafted = comparison.table(entry)
    assert header == ["drafter", "set to", "memory added", "training", "chat (1)", "qa (1)", "all prompts (2)"]
    assert plain[2:4] == ["–", "–"]
    assert drafted == [
        "a",
        "K = 2 | 3",
        "3.0",
        "10 min",
        "2.00 [2.00, 2.00]; 1.50",
        "1.50 [1.50, 1.50]; 1.50",
        "1.75 [1.50, 2.00]; 1.50",
    ]
    text = comparison.markdown({"by_temperature": {"0": entry}})
    assert "| a | K = 2 / 3 | 3.0 |" in text
    assert "- chat: too few prompts to tell (1; it takes 6); a comes first, 2.00 [2.00, 2.00]." in text
    assert "Of 2 greedy outputs 0 differ from plain decoding's." in text
    assert "3 more prompts had answers too short to be timed. Beware." in text
    assert "too short" not in comparison.markdown({"by_temperature": {"0": entry | {"left_out": 0}}})
    assert "differ" not in comparison.markdown({"by_temperature": {"1": entry | {"different": None}}})
    assert comparison.metrics(entry, "_at_1")["drafters/a/ratio_low_at_1"] == 1.5
    assert comparison.verdict_rows({"by_temperature": {"0": entry}})[0] == (
        "chat T=0",
        "too few prompts to tell (1; it takes 6); a comes first, 2.00 [2.00, 2.00]",
    )


# How ways are set


def test_the_longest_draft_that_pays_is_taken_worked_by_hand():
    """Ten rounds at K = 2: four keep none, four one, two two. Tokens a round: K = 1 1.6, K = 2 1.8."""
    counts = Acceptance(((0, 0, 0), (0, 0, 0), (4, 4, 2)), 18)
    assert best_length(counts, 1.0, Costs(1.0, 0.1, (1.0,) * 3, (0.0,) * 3)) == (2, pytest.approx(1.8 / 1.2))  # K = 1: 1.45
    assert best_length(counts, 1.0, Costs(1.0, 0.2, (1.0,) * 3, (0.0,) * 3)) == (1, pytest.approx(1.6 / 1.2))  # K = 2: 1.29


def test_a_round_without_a_match_costs_a_plain_step_worked_by_hand():
    """Six rounds of ten have no match. K = 1 writes 6 + 2 + 4 tokens for 6 + 4 · 1.5 steps, K = 2 13 for 6 + 4 · 2."""
    counts = Acceptance(((6, 0, 0), (0, 0, 0), (2, 1, 1)), 13)
    costs = Costs(1.0, 0.5, (1.0, 1.5, 2.0), (0.0,) * 3)
    assert best_length(counts, 0.0, costs) == (1, pytest.approx(12 / 12))
    assert best_length(counts, 0.0, replace(costs, verify=(1.0, 1.5, 1.6))) == (2, pytest.approx(13 / 12.4))


def test_a_model_is_paid_for_the_drafts_that_it_made():
    """Ten rounds of two drafts, one kept in each; the model made a fifth of them, at 0.5 steps each."""
    counts, costs = Acceptance(((0, 0, 0), (0, 0, 0), (0, 10, 0)), 20), Costs(1.0, 0.5, (1.0, 1.0, 1.0), (0.0,) * 3)
    assert best_length(counts, 0.2, costs) == (1, pytest.approx(2 / 1.1))
    assert best_length(counts, 1.0, costs) == (1, pytest.approx(2 / 1.5))


def test_the_shortest_match_is_the_one_that_pays_best_on_validation_text(monkeypatch):
    rounds = {
        1: ((0, 0), (9, 1)),  # one equal token is no sign of more
        2: ((5, 0), (1, 4)),
        3: ((9, 0), (0, 1)),  # three are too rare
    }

    def counted(target, way, texts, length):
        return Acceptance(rounds[way.options["lookup"].shortest], 0), 0.0

    monkeypatch.setattr(contestants, "_counted", counted)
    way = contestants._lookup(None, Way("prompt lookup", "", {}), [], Costs(1.0, 0.5, (1.0, 1.5), (0.0, 0.0)))
    assert (way.options["lookup"].shortest, way.options["lookup"].longest, way.options["num_draft_tokens"]) == (2, 3, 1)
    assert way.words == "K = 1 after 2 or more equal tokens"


def test_the_drafts_of_the_model_and_those_that_were_looked_up_are_told_apart():
    target = tiny(dtype=torch.float64)
    texts = [Response(Request(0, "validation", "p", "user", 0.0, (5, 9, 3, 7)), (1,) * 24, False)]
    model = Trained("draft model", Draft(perturbed(target)), 1.0)

    def share(lookup: dict, trained: Trained | None) -> float:
        return contestants._counted(target, Way("", "", lookup, trained), texts, 2)[1]

    assert share({"lookup": PromptLookup()}, None) == 0.0
    assert share({}, model) == 1.0
    assert 0 < share({"lookup": PromptLookup()}, model) < 1


def test_a_training_time_that_is_not_known_is_no_number():
    facts = Way("a", "", {}, Trained("heads", build(tiny(), 1, None), float("nan"))).facts(0)
    assert json.loads(json.dumps(facts, allow_nan=False))["training_seconds"] is None
    assert comparison._facts(facts)[3] == "–"


def test_memory_is_weights_packed_copies_and_a_cache_worked_by_hand():
    heads = build(tiny(), 2, None)
    per_head, matrix = 32 * 32 + 32, 32 * 48
    assert Trained("heads", heads, 0.0).bytes(100) == 4 * (2 * per_head + matrix)  # heads keep nothing of the text
    assert Trained("heads", heads.to(torch.bfloat16), 0.0).bytes(100) == 2 * (2 * per_head + matrix)
    heads.blocks[0].packed = "a copy"
    assert Trained("heads", heads, 0.0).bytes(100) == 2 * (2 * per_head + matrix + 32 * 32)
    model = tiny()
    config, weights = model.config, 4 * sum(p.numel() for p in model.parameters())
    cached = 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert Trained("model", Draft(model), 0.0).bytes(0) == weights
    assert Trained("model", Draft(model), 0.0).bytes(100) == weights + 100 * cached
    assert Way(PLAIN, "", {}).facts(100)["bytes"] == 0


@pytest.mark.parametrize("tree", ["auto", "off"])
def test_every_way_is_there_and_writes_what_plain_decoding_writes(tree):
    target = tiny(dtype=torch.float64)
    model, heads = (
        Trained("draft model", Draft(perturbed(target)), 60.0),
        Trained("Medusa heads", build(target, 2, None).double(), 1.0),
    )
    texts = [Response(Request(n, "validation", f"p{n}", "user", 0.0, (5 + n, 9, 3, 7)), (1,) * 12, False) for n in range(2)]
    found = ways(target, model, heads, texts, GREEDY, Decoding(tree=tree, longest_draft=2, max_new_tokens=12), seed=0)
    names = [
        "none", "prompt lookup", "draft model, chain", "draft model, tree", "Medusa heads, chain", "Medusa heads, tree",
        "lookup else model",
    ]  # fmt: skip
    assert [way.name for way in found] == [name for name in names if tree == "auto" or not name.endswith("tree")]
    assert len({tuple(way.decode(target, [4, 8, 15, 4], 10).tokens[0]) for way in found}) == 1
    assert [way.facts(9)["training_seconds"] for way in found if "model" in way.name] == [60.0] * (3 if tree == "auto" else 2)
    assert [way.name for way in found if way.words.startswith("K = ")] == [name for name in names[1:] if "tree" not in name]
    looking = [way.options.get("lookup") is not None for way in found]
    assert looking == [way.name in ("prompt lookup", "lookup else model") for way in found]


# Prompts


def test_short_answers_are_not_timed():
    target = tiny()
    target.generation_config.eos_token_id = list(range(48))  # the first token ends every answer

    class Words:
        eos_token_id = None

    with pytest.raises(PipelineError, match=r"decoding\.max_new_tokens=20: no answer to the prompts of the comparison has 16"):
        drafter_prompts.answered(target, Words(), [Case(CHAT, (1, 2), 0)], 20, GREEDY, 0)
    target.generation_config.eos_token_id = None
    [case] = drafter_prompts.answered(target, Words(), [Case(CHAT, (1, 2), 0)], 20, GREEDY, 0)
    assert case == Case(CHAT, (1, 2), 0, 20)


# Refusals


def test_the_comparison_needs_a_draft_model():
    with pytest.raises(PipelineError, match=r"draft\.kind=medusa: the comparison has a draft model and takes heads by"):
        check(composed("+experiment=drafters", "draft=medusa", "codec=hidden"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafters.heads=nowhere", "drafters.heads=nowhere: give a result folder of the stage distil"),
        ("drafters.path=nowhere.jsonl", "drafters.path=nowhere.jsonl: there is no such file"),
    ],
)
def test_files_that_are_not_there_are_refused(work, refused, override, message):
    assert message in refused(SMOKE, "stages=[drafters]", override, work=work)


def test_a_draft_model_in_the_place_of_heads_is_refused(work, refused):
    place = newest(work, "distil")
    message = refused(SMOKE, "stages=[drafters]", f"drafters.heads={place}", work=work)
    assert "a draft model lies there; name the folder of a run with draft=medusa" in message


def test_columns_of_the_file_are_named_by_their_keys(work, refused, tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps({"turns": ["Say it."], "kind": "x"}) + "\n")
    message = refused(SMOKE, "stages=[drafters]", f"drafters.path={path}", work=work)
    assert "drafters.category=category is not a column of some.jsonl" in message
    message = refused(SMOKE, "stages=[drafters]", f"drafters.path={path}", "drafters.category=kind",
                      "drafters.max_prompt_tokens=3", work=work)  # fmt: skip
    assert "drafters.max_prompt_tokens=3: no prompt of some.jsonl has 3 tokens or fewer" in message


# A whole run


def test_the_smoke_run_compares_all_drafters(work, attempt, tmp_path):
    code, stderr = attempt(*MEDUSA, "stages=[logits,distil]", work=work)
    assert code == 0, stderr
    heads = newest(work, "distil")
    path = tmp_path / "bench.jsonl"
    categories = ["qa", *sorted(MT_BENCH)]
    path.write_text(
        "".join(json.dumps({"turns": [f"Say {c}.", "Again."], "category": c}) + "\n" for c in categories for _ in range(2))
    )
    options = (SMOKE, "stages=[drafters]", f"drafters.heads={heads}", f"drafters.path={path}", "drafters.prompts=1",
               "drafters.max_prompt_tokens=200", "decoding.temperatures=[0.0]", "decoding.tree=auto")  # fmt: skip
    code, stderr = attempt(*options, work=work)
    assert code == 0, stderr
    folder = newest(work, "drafters")
    entry = json.loads((folder / "drafters.json").read_text())["by_temperature"]["0"]
    assert list(entry["kinds"]) == [CHAT, CODE, "qa", CONVERSATION, ALL]
    assert len(entry["ways"]) == 7
    assert (entry["compared"], entry["different"], entry["left_out"]) == (24, 0, 0)
    assert all(way["training_seconds"] > 0 for way in entry["ways"] if way["bytes"])
    [output] = [p for p in (work / "runs").iterdir() if (p / "drafters.md").is_file()]
    text = (output / "drafters.md").read_text()
    assert "| Medusa heads, tree |" in text
    for page in (text, (output / "drafters.html").read_text()):
        assert "python -m pipeline +experiment=smoke stages=[drafters] drafters.heads=… drafters.path=…" in page
        assert str(work) not in page
    assert re.search(r"^- qa: .*\.$", text, re.MULTILINE)
    assert '<td class="text">lookup else model</td>' in (output / "drafters.html").read_text()
    metrics = json.loads((folder / "manifest.json").read_text())["metrics"]
    assert metrics["drafters/none/ratio"] == 1.0
    every = entry["kinds"][ALL]["ways"]["lookup else model"]["tokens_per_round"]
    assert metrics["drafters/lookup_else_model/tokens_per_round"] == every >= 1.0
    assert entry["foreign"] == ""  # the heads learnt from this run's own responses


def test_training_that_was_broken_off_counts_as_far_as_it_logged():
    class Info:
        def __init__(self, status, end):
            self.status, self.start_time, self.end_time, self.run_id, self.experiment_id = status, 1000, end, status, "1"

    class Client:
        def get_run(self, run_id):
            return type("R", (), {"info": Info("RUNNING", None)})

        def search_runs(self, experiments, wanted):
            assert (experiments, wanted) == (["1"], "tags.fingerprint = 'abc'")
            data = type("D", (), {"metrics": {"train/loss": 1.0}})
            return [type("R", (), {"info": Info(s, e), "data": data}) for s, e in (("FINISHED", 5000), ("KILLED", 90000))]

        def get_metric_history(self, run_id, name):
            return [type("M", (), {"timestamp": 3000})]

    run = type("Run", (), {"client": Client(), "run_id": "x"})
    assert effort.seconds(run, "abc") == 6.0
    run.client.search_runs = lambda experiments, wanted: []
    assert math.isnan(effort.seconds(run, "abc"))
