"""What people look at: three jobs of a sweep, compared on MLflow's page in headless Chromium."""

import re
import shutil

import pytest

from pipeline import tracking
from pipeline.config import Tracking
from tests.pipeline.servers import running
from tests.pipeline.test_tracking import HEADLINE

pytestmark = pytest.mark.browser
SIZES = (4096, 8192, 16384)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A store with a sweep of three jobs, written as the pipeline writes it; the numbers are invented."""
    work, config = tmp_path_factory.mktemp("browser"), Tracking()
    sweep = tracking.open_sweep(config, work, "sweep draft.vocabulary_size", "command", "token")
    for number, size in enumerate(SIZES, start=1):
        name = f"draft.vocabulary_size={size}"
        with tracking.execution(config, work, name, {}, "token") as run:
            run.tags({"overrides": name})
            run.params({"draft.vocabulary_size": size, "seed": 0})
            run.metrics({metric: number + place / 100 for place, metric in enumerate(HEADLINE)})
    sweep.end("FINISHED")
    return work


@pytest.fixture(scope="module")
def address(work):
    """`mlflow ui` over the store."""
    with running("ui", work, "--backend-store-uri", f"sqlite:///{work / 'mlflow.db'}") as uri:
        yield uri


@pytest.fixture
def tab(work):
    """An empty tab; on failure its picture is kept beside the store."""
    from playwright.sync_api import sync_playwright  # the extra `browser`

    chromium = shutil.which("chromium")
    assert chromium, "no chromium here; Debian has it as the package chromium"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1600, "height": 1200})
        tab.set_default_timeout(60_000)
        yield tab
        tab.screenshot(path=work / "last.png")
        browser.close()


def test_three_jobs_of_a_sweep_compare_by_headline_metrics_and_a_figure(address, work, tab):
    run, _ = tracking.read(Tracking(), work, "last", "record.json")
    number = run.client.get_run(run.run_id).info.experiment_id
    tab.goto(f"{address}/#/experiments/{number}/runs")
    rows = tab.get_by_role("row")
    rows.filter(has_text="sweep draft").get_by_role("button").first.click()  # the jobs are folded away below their sweep
    for size in SIZES:
        rows.filter(has_text=f"vocabulary_size={size}").get_by_role("checkbox").first.check()
    tab.get_by_test_id("runs-compare-button").click()
    tab.wait_for_url(re.compile("compare-runs"))
    for metric in HEADLINE:
        tab.get_by_text(metric, exact=True).first.wait_for()
    for size in SIZES:
        assert tab.get_by_text(f"draft.vocabulary_size={size}").count()
    figure = tab.locator(".js-plotly-plot").first
    figure.wait_for()
    box = figure.bounding_box()
    assert box["width"] > 200, box
    assert box["height"] > 100, box
