"""The page of one run, of forty, of failed ones and of long names: self-contained, escaped, with the right numbers."""

import json
import math
import re

import pytest

from pipeline import page, study
from pipeline.errors import PipelineError
from pipeline.link import agreement_by_kind, correlations, kept, link, slices
from pipeline.page import measured
from tests.pipeline.conftest import SMOKE, only
from tests.pipeline.documents import document, rows

FETCHES = re.compile(r"""(?:src|href)=["'](?!data:)|url\((?!["']?data:)|<script|@import|https?://""")


@pytest.fixture(scope="module")
def forty() -> str:
    return page.render("A sweep", rows(40, failed=4), "python -m pipeline.study 0123")


def test_forty_drafts_and_four_that_failed(forty):
    assert "44 drafts, 40 measured" in forty
    assert [name for name in page.CHARTS if f'<figure id="{name}"' in forty] == list(page.CHARTS)
    assert forty.count("the loss is nan at step 3") == 2
    assert "or it was stopped" in forty, "a killed run has no error to show"
    assert "Spearman speed" in forty


def test_nothing_is_fetched(forty):
    assert not FETCHES.search(re.sub(r"data:image/svg\+xml;base64,[\w+/=]+", "data:", forty))


@pytest.mark.parametrize("planted", ["<script src=x>", '<img src="a.png">', "<style>@import 'a'</style>", "url(a.png)"])
def test_what_would_be_fetched_is_found(planted):
    assert FETCHES.search(planted)


def test_one_run_has_neither_correlations_nor_a_front():
    alone = page.render("A run", rows(1), "")
    assert "1 draft, 1 measured" in alone
    assert "Spearman" not in alone
    assert 'id="pareto"' not in alone
    assert 'id="waterfall"' in alone


def test_a_sweep_in_which_all_failed_still_has_a_page():
    failed = page.render("A sweep", rows(0, failed=3), "")
    assert "3 drafts, 0 measured" in failed
    assert "<figure" not in failed


def test_names_and_errors_are_text_and_may_be_long():
    name = "corpus.path=<b>&" + "a" * 500
    text = page.render("<script>alert(1)</script>", rows(2, 1, name), "")
    assert "<script" not in text
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" + "a" * 500 in text


def test_the_link_by_hand():
    drafts = measured(rows(3))
    for number, draft in enumerate(drafts):
        entry = draft.at("1")
        entry |= {"predicted": 1.0 + number / 10, "tokens_per_round": 1.5, "tokens_per_round_predicted": 1.6, "draft_tokens": 2}
        entry["ratio"]["median"] = 1.0 + number / 5
    found = link(drafts, "1")
    assert found["drafts"] == 3
    assert found["r2_speed"] == pytest.approx(1 - (0.01 + 0.04) / 0.08)
    assert found["median_abs_error_speed"] == pytest.approx(0.1 / 1.2)
    assert found["median_abs_error_acceptance"] == pytest.approx(0.05)
    assert kept(drafts[0].at("1")) == pytest.approx(0.25)


def test_correlations_have_the_sign_of_their_measure():
    table = dict(correlations(measured(rows(24)), "1", seed=0))
    assert table["overlap"]["Spearman acceptance"][0] > 0.3
    assert table["forward_kl"]["Pearson acceptance"][0] < -0.3
    assert all(low <= value <= high for found in table.values() for value, low, high in found.values())


def test_slices_count_every_timing():
    assert [(kind, count) for kind, count, *_ in slices(measured(rows(3)), "0")] == [("explain", 6), ("test", 6), ("write", 6)]


def test_agreement_by_kind_is_the_median_over_drafts_that_have_it():
    drafts = measured(rows(3))
    assert agreement_by_kind(drafts, "0") == []
    for number, draft in enumerate(drafts[1:], start=1):
        draft.at("0")["kinds"] = {"a<b>": {"overlap": number / 10, "positions": 5}}
    assert agreement_by_kind(drafts, "0") == [("a<b>", 10, pytest.approx(0.15))]
    text = page.render("A sweep", [page.Row(d.number, d.name, "FINISHED", "", d.document) for d in drafts], "")
    assert '<td class="text">a&lt;b&gt;</td><td>10</td><td>0.150</td>' in text


def test_a_position_that_was_never_reached_is_a_dash():
    lost = document(0.3)
    for entry in lost["by_temperature"].values():
        entry["by_position"] = [0.0, math.nan]
    assert "nan" not in re.sub(r"base64,[\w+/=]+", "", page.render("A run", [page.Row(1, "a", "FINISHED", "", lost)], ""))


def test_drafts_are_named_by_what_sets_them_apart():
    assert study.distinct(["a=1 c=3", "a=2 c=3"]) == ["a=1", "a=2"]
    assert study.distinct(["a=1"]) == ["a=1"]
    assert study.distinct(["", ""]) == ["default", "default"]


def test_report_stage_writes_the_page_and_the_record(smoke):
    folder = only(smoke.work / "artifacts" / "report")
    text = (folder / "report.html").read_text()
    assert all(f'id="{name}"' in text for name in ("speed", "positions", "waterfall", "curves"))
    [output] = (smoke.work / "runs").iterdir()
    published = (output / "report.html").read_text()
    before, after = text.split(page.PLACE)
    assert published.startswith(before)
    assert published.endswith(after)
    assert "<h2>Alignment by kind of prompt</h2>" in text
    assert "<h2>Beside this draft</h2>" not in text, "what stands beside a draft changes, the stage's result does not"


def test_what_is_published_shows_the_drafts_beside_this_one(smoke):
    [output] = (smoke.work / "runs").iterdir()
    told, shown = (output / "report.md").read_text(), (output / "report.html").read_text()
    lines = json.loads((output / "record.json").read_text())["beside"]
    own = only(smoke.work / "artifacts" / "distil").name
    assert [line["draft"] for line in lines] == [None, own, None, own]
    assert all(found.keys() == {"0", "1"} for found in (lines[0]["test"], lines[1]["test"], lines[1]["validation"]))
    assert lines[1]["measured"].keys() == {"0", "1"}
    wanted = [SMOKE, f"paths.work={smoke.work}", "objective=cross_entropy", "stages=[corpus,generate,logits,distil]"]
    assert lines[2]["arguments"] == wanted
    assert f"python -m pipeline {SMOKE} paths.work={smoke.work} objective=cross_entropy 'stages=" in told
    for text in (told, shown, smoke.stdout):
        assert all(name in text for name in ("undistilled", "this draft", "cross-entropy alone", "best so far"))
    assert smoke.stdout.rstrip().endswith("'stages=[corpus,generate,logits,distil]'")
    assert str(smoke.work) not in shown


def test_study_reads_an_execution_from_the_store(smoke, tmp_path, capsys):
    study.main(["last", "--work", str(smoke.work), "--to", str(tmp_path / "page")])
    assert "1 drafts, 1 measured" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "page").iterdir()}
    assert written == {"report.html", "speed.png", "positions.png", "waterfall.png", "curves.png"}
    assert 'id="waterfall"' in (tmp_path / "page" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"), [(["zzz"], "no such run in sqlite"), (["last", "--work", "/no/such"], "no store")]
)
def test_what_is_not_there_is_named(smoke, arguments, message):
    where = [] if "--work" in arguments else ["--work", str(smoke.work)]
    with pytest.raises(SystemExit, match=message):
        study.main([*arguments, *where])


def test_a_sweep_without_a_measured_job_is_refused(smoke, monkeypatch):
    monkeypatch.setattr(study.tracking, "read", lambda *args: (None, []))
    with pytest.raises(PipelineError, match="no run of it reached the report stage"):
        study.make(study.Tracking(), smoke.work, "last", None)
