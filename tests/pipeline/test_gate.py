"""The gate compares figures with thresholds, names what failed and by how much, and keeps what it saw."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import gate
from pipeline.check import FEWEST_PROMPTS, check
from pipeline.choices import Stage
from pipeline.config import Config, Decoding, Export, Target
from pipeline.errors import PipelineError
from pipeline.statistics import FEWEST
from tests.pipeline.exported import MEASURED, config_of

NAN = float("nan")


def measured(overlap=0.5, low=1.1, **lossless):
    found = copy.deepcopy(MEASURED)
    found["by_temperature"]["0"]["after"]["overlap"] = overlap
    found["by_temperature"]["0"]["ratio"]["low"] = low
    found["lossless"] |= lossless
    return found


def failed(export=Export(), memory=10.0, **figures):  # noqa: B008
    return [found.key for found in gate.checks(export, measured(**figures), memory) if not found.passed]


def test_a_good_draft_passes():
    assert failed() == []
    gate.refuse(gate.checks(Export(), measured(), 10.0), "gate.json")


@pytest.mark.parametrize(
    ("export", "figures", "key"),
    [
        (Export(), {"overlap": 0.0}, "export.minimum_overlap"),  # a random draft
        (Export(), {"overlap": 0.0999}, "export.minimum_overlap"),
        (Export(), {"overlap": NAN}, "export.minimum_overlap"),
        (Export(), {"low": 0.999}, "export.minimum_ratio"),
        (Export(), {"low": NAN}, "export.minimum_ratio"),
        (Export(minimum_ratio=1.2), {"low": 1.1}, "export.minimum_ratio"),
        (Export(), {"different": 1}, "export.lossless"),
        (Export(), {"oracle_different": 1}, "export.lossless"),
        (Export(), {"prompts": 0}, "export.lossless"),
        (Export(maximum_memory=9.9), {}, "export.maximum_memory"),
    ],
)
def test_one_figure_that_fails(export, figures, key):
    assert failed(export, **figures) == [key]


@pytest.mark.parametrize(
    ("export", "figures"),
    [
        (Export(), {"overlap": 0.1}),
        (Export(), {"low": 1.0}),
        (Export(maximum_memory=10.0), {}),
        (Export(lossless=False), {"different": 3}),
        (Export(minimum_overlap=0.0, minimum_ratio=0.0), {"overlap": 0.0, "low": 0.2}),
    ],
)
def test_a_figure_on_the_threshold_or_not_asked_for_passes(export, figures):
    assert failed(export, **figures) == []


def test_one_temperature_that_loses_is_enough():
    found = measured()
    found["by_temperature"]["1"] = copy.deepcopy(found["by_temperature"]["0"]) | {"ratio": {"low": 0.9}}
    [bad] = [c for c in gate.checks(Export(), found, 1.0) if not c.passed]
    assert (bad.key, bad.at, bad.value) == ("export.minimum_ratio", "1", 0.9)


@pytest.mark.parametrize(("prompts", "passes"), [(1, False), (5, False), (6, True)])
def test_few_prompts_prove_no_ratio(prompts, passes):
    """One prompt has an interval without width: its lower end is its ratio."""
    found = measured(low=1.5)
    found["by_temperature"]["0"]["prompts"] = [{}] * prompts
    bad = [check.key for check in gate.checks(Export(), found, 1.0) if not check.passed]
    assert bad == ([] if passes else ["decoding.prompts"])
    assert all(check.passed for check in gate.checks(Export(minimum_ratio=0.0), found, 1.0))  # where none is asked for
    if not passes:
        message = f"number of prompts timed at temperature 0 is {prompts}, {6 - prompts} below decoding.prompts=6"
        with pytest.raises(PipelineError, match=message):
            gate.refuse(gate.checks(Export(), found, 1.0), "gate.json")


def test_too_few_prompts_for_the_gate_are_refused_before_anything_runs():
    few = Decoding(prompts=5)
    with pytest.raises(PipelineError, match=r"^decoding\.prompts=5: the gate judges no speed ratio of so few; give 6 or more"):
        check(Config(target=Target(path="x"), decoding=few))
    check(Config(target=Target(path="x"), decoding=Decoding(prompts=6)))
    for allowed in (Export(gate=False), Export(minimum_ratio=0.0)):
        check(Config(target=Target(path="x"), decoding=few, export=allowed))
    check(Config(target=Target(path="x"), decoding=few, stages=[stage for stage in Stage if stage is not Stage.export][:7]))
    assert FEWEST_PROMPTS == FEWEST


def test_the_message_names_every_figure_and_by_how_much():
    found = gate.checks(Export(maximum_memory=8), measured(overlap=0.04, low=0.9, different=2), 10.0)
    with pytest.raises(PipelineError) as refused:
        gate.refuse(found, "somewhere/gate.json")
    message = str(refused.value)
    assert message.startswith("export.gate=on: ")
    assert "overlap at temperature 0 is 0.04, 0.06 below export.minimum_overlap=0.1" in message
    assert "lower end of the speed ratio at temperature 0 is 0.9, 0.1 below export.minimum_ratio=1" in message
    assert "number of answers that speculation changed is 2, 2 above export.lossless=0" in message
    assert "memory added, in MiB, is 10, 2 above export.maximum_memory=8" in message
    assert "somewhere/gate.json" in message
    assert "export.gate=off" in message


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 3), st.floats(0.1, 3))
def test_a_better_draft_never_fails_where_a_worse_one_passes(overlap, more, low, faster):
    if not failed(overlap=overlap, low=low):
        assert not failed(overlap=max(overlap, more), low=max(low, faster))


def test_evidence_holds_every_check_and_the_switch():
    found = gate.checks(Export(gate=False), measured(low=0.5), 10.0)
    evidence = gate.evidence(Export(gate=False), found, 10.0, "abc", "fed")
    assert (evidence["gate"], evidence["passed"], evidence["draft_sha256"], evidence["speculate"]) == (
        "off",
        False,
        "abc",
        "fed",
    )
    assert [c["passed"] for c in evidence["checks"]] == [True, False, True, True, True]


def test_memory_by_hand():
    # 1000 weights, and for 10 positions in 3 layers: keys and values of 2 heads of width 8, 2 bytes each.
    assert gate.extra_memory(config_of("llama"), 1000, 2, 10) == (1000 + 2 * 3 * 2 * 8 * 10) * 2 / 2**20
    assert gate.extra_memory(config_of("gpt2"), 0, 4, 1) == 2 * 3 * 4 * 8 * 4 / 2**20


def test_files_that_were_altered_are_refused():
    gate.refuse_altered("a" * 64, "a" * 64)
    with pytest.raises(PipelineError, match="altered after they were measured"):
        gate.refuse_altered("a" * 64, "b" * 64)
    with pytest.raises(PipelineError, match="kept no hash"):
        gate.refuse_altered(None, "b" * 64)


@pytest.mark.parametrize(
    ("export", "key"),
    [
        (Export(minimum_overlap=1.1), "export.minimum_overlap=1.1"),
        (Export(minimum_overlap=-0.1), "export.minimum_overlap=-0.1"),
        (Export(minimum_overlap=NAN), "export.minimum_overlap=nan"),
        (Export(minimum_ratio=-1), "export.minimum_ratio=-1"),
        (Export(minimum_ratio=NAN), "export.minimum_ratio=nan"),
        (Export(minimum_ratio=float("inf")), "export.minimum_ratio=inf"),
        (Export(maximum_memory=0), "export.maximum_memory=0"),
        (Export(maximum_memory=NAN), "export.maximum_memory=nan"),
    ],
)
def test_thresholds_that_mean_nothing_are_refused(export, key):
    with pytest.raises(PipelineError, match=f"^{key}: give"):
        check(Config(target=Target(path="x"), export=export))
