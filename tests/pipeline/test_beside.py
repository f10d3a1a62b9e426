"""The drafts beside a run's own, found among made-up results: same cache, same settings, damaged ones passed over."""

import json
import shlex

import pytest

from data.artifact import fingerprint
from pipeline import beside, beside_table, page
from pipeline.beside import BEST, THIS, TWIN, UNDISTILLED, Neighbour, neighbours, results, twin_arguments
from pipeline.config import Objective
from tests.pipeline.conftest import SMOKE
from tests.pipeline.documents import rows
from tests.pipeline.test_config import composed

PARENTS = {"logits": "cache", "generate": "text"}
CROSS_ENTROPY = {"divergence": "cross_entropy", "hard_weight": 0.0, "reference": None, "reference_files": None}


def write(folder, identity, details) -> str:
    """Finish a result as a stage does; gives its fingerprint."""
    name = fingerprint(identity)
    (folder / name).mkdir(parents=True)
    (folder / name / "manifest.json").write_text(json.dumps({"identity": identity, "metrics": {}, "details": details}))
    return name


def distilled(folder, ratio: float, parents=PARENTS, objective=None, layers=(0, 1), steps: int = 600) -> str:
    identity = {
        "stage": "distil",
        "format": 3,
        "parents": parents,
        "draft": {"layers": list(layers)},
        "objective": CROSS_ENTROPY | {"divergence": "forward_kl"} | (objective or {}),
        "trainer": {"max_steps": steps},
        "seed": 0,
    }
    overlaps = {
        "validation-1/overlap": ratio / 3,
        "validation-1/top1": 0.4,
        "validation-0/overlap": 0.5,
        "validation-0/top1": 0.6,
    }
    details = {
        "validation": overlaps | {"validation-1/overlap_kind_test": 0.1, "validation/ratio_estimated": ratio},
        "draft/ratio_estimated": ratio,
        "best_step": steps - 100,
        "shape": {"read_per_step": 6_000_000 * len(layers)},
    }
    return write(folder / "distil", identity, details)


def raced(folder, draft: str, ratio: float, machine: str = "here", before: bool = True) -> str:
    identity = {"stage": "speculate", "format": 6, "decoding": {}, "machine": machine, "parents": {"distil": draft}}
    entry = {
        "ratio": {"median": ratio, "low": ratio - 0.1, "high": ratio + 0.1},
        "before": {"overlap": 0.05, "top1": 0.04, "forward_kl": 9.0} if before else None,
        "after": {"overlap": 0.45, "top1": 0.35, "forward_kl": 1.0},
    }
    return write(folder / "speculate", identity, {"by_temperature": {"0": entry, "1": entry | {"lossy": {}}}})


def found(folder, own: str, race: str, arguments=("objective=cross_entropy",)) -> dict[str, Neighbour]:
    lines = neighbours(own, race, results(folder / "distil"), results(folder / "speculate"), list(arguments))
    return {line.name: line for line in lines}


def test_the_twin_is_this_run_s_with_cross_entropy_and_nothing_else_changed(tmp_path):
    own = distilled(tmp_path, 1.3)
    twin = distilled(tmp_path, 1.2, objective=CROSS_ENTROPY)
    race = raced(tmp_path, own, 1.1)
    lines = found(tmp_path, own, race)
    assert list(lines) == [UNDISTILLED, THIS, TWIN, BEST]
    assert (lines[TWIN].draft, lines[TWIN].arguments) == (twin, [])
    assert lines[TWIN].differs == ["objective.divergence: forward_kl → cross_entropy"]
    assert lines[THIS].validation == {"1": {"overlap": 1.3 / 3, "top1": 0.4}, "0": {"overlap": 0.5, "top1": 0.6}}
    assert (lines[THIS].best_step, lines[THIS].steps, lines[THIS].read_per_step) == (500, 600, 12_000_000)
    assert lines[BEST].draft == own
    assert lines[UNDISTILLED].test["0"] == {"overlap": 0.05, "top1": 0.04}
    assert lines[THIS].test["1"] == {"overlap": 0.45, "top1": 0.35}
    assert lines[TWIN].test == {}
    assert beside_table.missing([*lines.values()]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 6000},  # not at equal compute
        {"objective": CROSS_ENTROPY | {"reference": "a draft"}},  # not cross-entropy alone
        {"objective": {"divergence": "overlap"}},
        {"parents": PARENTS | {"logits": "another cache"}},
    ],
)
def test_what_is_nearly_a_twin_is_none(tmp_path, changes):
    own = distilled(tmp_path, 1.3)
    distilled(tmp_path, 1.2, **{"objective": CROSS_ENTROPY} | changes)
    assert found(tmp_path, own, "")[TWIN].draft is None


def test_a_draft_from_another_cache_is_not_the_best_so_far(tmp_path):
    own = distilled(tmp_path, 1.3)
    distilled(tmp_path, 9.0, parents=PARENTS | {"logits": "another cache"})
    assert found(tmp_path, own, "")[BEST].draft == own


def test_without_a_twin_the_command_that_makes_it_is_said(tmp_path):
    own = distilled(tmp_path, 1.3)
    lines = [*found(tmp_path, own, raced(tmp_path, own, 1.1)).values()]
    assert lines[2] == Neighbour(TWIN, arguments=["objective=cross_entropy"])
    text = beside_table.markdown(lines)
    assert "\n```console\npython -m pipeline objective=cross_entropy\n```\n" in text
    assert "| cross-entropy alone | – | – | – | – | – | – | – | – |" in text
    lines[2] = Neighbour(TWIN)
    assert "name a codec" in beside_table.markdown(lines)
    assert "```" not in beside_table.markdown(lines)


def test_a_run_by_cross_entropy_is_its_own_twin(tmp_path):
    own = distilled(tmp_path, 1.3, objective=CROSS_ENTROPY)
    distilled(tmp_path, 1.4, objective=CROSS_ENTROPY | {"hard_weight": 0.5})
    assert found(tmp_path, own, "")[TWIN].draft == own


def test_the_best_so_far_may_be_another_and_what_tells_it_apart_is_said(tmp_path):
    own = distilled(tmp_path, 1.3)
    best = distilled(tmp_path, 1.5, layers=(0, 1, 2, 3), steps=3000)
    race = raced(tmp_path, own, 1.1)
    raced(tmp_path, best, 1.9, machine="elsewhere")
    lines = found(tmp_path, own, race)
    assert lines[BEST].draft == best
    assert lines[BEST].differs == ["draft.layers: [0, 1] → [0, 1, 2, 3]", "trainer.max_steps: 600 → 3000"]
    assert not lines[BEST].alike
    raced(tmp_path, best, 1.4)
    again = found(tmp_path, own, race)
    assert again[BEST].alike, "of its races the one with this run's settings is shown"
    assert again[BEST].measured["1"] == {"median": 1.4, "low": pytest.approx(1.3), "high": pytest.approx(1.5), "lossy": True}
    header, *table = beside_table.table([*lines.values()])
    assert header[1] == "overlap, validation text, T=0 · T=1"
    assert table[3][:5] == [BEST, "0.500 · 0.500", "0.600 · 0.400", "0.450 · 0.450", "0.350 · 0.350"]
    assert table[3][5:8] == ["1.50", "2900 of 3000", "24.0 M"]
    assert table[3][8] == "1.90 [1.80, 2.00] · 1.90 [1.80, 2.00] (lossy) *"
    notes = beside_table.notes([*lines.values()])
    assert any("draft.layers: [0, 1] → [0, 1, 2, 3]; trainer.max_steps" in note for note in notes)
    assert notes[-1].startswith("* ")


SPOILT = {
    "cut": '{"identity": {"stage',
    "binary": b"\xff\xfe\x00",
    "a list": "[]",
    "without details": '{"identity": {}}',
}


@pytest.mark.parametrize("content", SPOILT.values(), ids=SPOILT)
def test_damaged_and_foreign_manifests_are_passed_over(tmp_path, content):
    own = distilled(tmp_path, 1.3)
    race = raced(tmp_path, own, 1.1)
    for stage in ("distil", "speculate"):
        spoilt = tmp_path / stage / "0000000000000000" / "manifest.json"
        spoilt.parent.mkdir()
        spoilt.write_bytes(content if isinstance(content, bytes) else content.encode())
        (tmp_path / stage / "1111111111111111" / "manifest.json").mkdir(parents=True)
    assert found(tmp_path, own, race)[BEST].draft == own


def test_a_manifest_that_is_not_what_its_folder_is_named_is_passed_over(tmp_path):
    own = distilled(tmp_path, 1.3)
    better = tmp_path / "distil" / distilled(tmp_path, 9.0, layers=(0,))
    better.rename(better.with_name("0123456789abcdef"))
    assert found(tmp_path, own, "")[BEST].draft == own


@pytest.mark.parametrize("spoil", ["nan", "infinite", "no ratio", "no steps", "a word", "no validation"])
def test_a_draft_that_does_not_say_it_all_is_passed_over(tmp_path, spoil):
    own = distilled(tmp_path, 1.3)
    path = tmp_path / "distil" / distilled(tmp_path, 9.0, layers=(0,)) / "manifest.json"
    manifest = json.loads(path.read_text())
    details = manifest["details"]
    if spoil == "no steps":
        del details["best_step"]
    elif spoil == "no validation":
        details["validation"] = None
    else:
        details |= {
            "draft/ratio_estimated": {"nan": float("nan"), "infinite": float("inf"), "no ratio": None, "a word": "fast"}[spoil]
        }
    path.write_text(json.dumps(manifest))
    assert found(tmp_path, own, "")[BEST].draft == own


def test_a_race_that_is_not_whole_measures_nothing(tmp_path):
    own = distilled(tmp_path, 1.3)
    write(tmp_path / "speculate", {"parents": {"distil": own}}, {"by_temperature": {"0": {}}})
    write(tmp_path / "speculate", {"parents": None}, {})
    lines = found(tmp_path, own, raced(tmp_path, own, 1.1, before=False))
    assert lines[THIS].measured["0"]["median"] == 1.1
    assert lines[UNDISTILLED].test == {}
    assert "decoding.baselines=true" in beside_table.markdown([*lines.values()])


def test_a_draft_measured_as_it_is_has_nothing_beside_it(tmp_path):
    own = write(tmp_path / "distil", {"stage": "distil", "as_it_is": True, "parents": PARENTS}, {"shape": {}})
    assert found(tmp_path, own, "") == {}


def test_the_command_of_the_twin_changes_the_objective_and_the_stages_alone():
    given = ["+experiment=smoke", "objective=hybrid", "objective.eta=1.0", "++stages=[report]", "corpus.train=40",
             "+objective@objective=overlap", "target.system_prompt='It''s \"a b\" $HOME'"]  # fmt: skip
    arguments = twin_arguments(given, Objective())
    assert arguments == [given[0], given[4], given[6], "objective=cross_entropy", beside.STAGES]
    text = beside_table.command(arguments)
    assert shlex.split(text) == ["python", "-m", "pipeline", *arguments]


@pytest.mark.parametrize("overrides", [["+experiment=full"], ["objective=hybrid", "objective.eta=1.0"], []])
def test_the_configuration_of_the_twin_is_this_run_s_but_for_the_objective(overrides):
    run = composed(*overrides)
    twin = composed(*twin_arguments(overrides, run.objective))
    assert twin.objective == composed("objective=cross_entropy").objective
    assert [stage.name for stage in twin.stages] == ["corpus", "generate", "logits", "distil"]
    same = ("corpus", "target", "generate", "codec", "draft", "optimizer", "trainer", "seed")
    assert all(getattr(run, name) == getattr(twin, name) for name in same)


def test_a_reference_that_an_experiment_names_is_left_out():
    arguments = twin_arguments(["+experiment=mine"], Objective(reference="a draft", keep=0.5))
    assert arguments[1:4] == ["objective=cross_entropy", "objective.reference=null", "objective.keep=1.0"]


def test_the_page_shows_the_table_and_keeps_what_may_be_private(tmp_path):
    own = distilled(tmp_path, 1.3)
    distilled(tmp_path, 1.5, layers=(0,))
    arguments = twin_arguments(["corpus.path=/home/me/<secret>.txt"], Objective())
    lines = [*found(tmp_path, own, raced(tmp_path, own, 1.1), arguments).values()]
    text = page.with_beside(page.render("A run", rows(1), ""), lines)
    assert page.PLACE not in text
    for name in (UNDISTILLED, THIS, TWIN, BEST):
        assert text.count(f'<td class="text" style="min-width:8rem">{name}</td>') == 1
    assert "secret" not in text
    assert "corpus.path=…" in text
    assert "/home/me/<secret>.txt" in beside_table.markdown(lines)


def test_the_table_is_printed_and_its_command_can_be_copied(tmp_path, capsys):
    own = distilled(tmp_path, 1.3)
    arguments = twin_arguments(["corpus.path=" + "a" * 200], Objective())
    beside_table.show([*found(tmp_path, own, raced(tmp_path, own, 1.1), arguments).values()])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].strip() == "Beside this draft"
    assert printed[-1] == beside_table.command(arguments)


def test_the_command_that_is_printed_makes_the_twin_that_the_next_execution_finds(work, attempt):
    for overrides in (twin_arguments([SMOKE], Objective()), [SMOKE]):
        code, stderr = attempt(*overrides, work=work)
        assert code == 0, stderr
    [record] = (work / "runs").glob("*/record.json")  # the copy begins without runs
    lines = {line["name"]: Neighbour(**line) for line in json.loads(record.read_text())["beside"]}
    assert lines[TWIN].draft != lines[THIS].draft
    assert "objective.divergence: forward_kl → cross_entropy" in lines[TWIN].differs
    assert lines[TWIN].steps == lines[THIS].steps
    assert lines[BEST].ratio_estimated == max(lines[THIS].ratio_estimated, lines[TWIN].ratio_estimated)
