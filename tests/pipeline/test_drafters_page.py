"""The comparison for the eye: a page of its own, and a part of the report of the run that made it."""

from dataclasses import replace

from pipeline import comparison, drafters_page, page, record, report
from pipeline.choices import Stage
from speculative.metrics import Acceptance
from tests.pipeline.exported import finished

ONE = Acceptance(((0, 0), (1, 1)), 3)


def details(kind: str = "chat") -> dict:
    names = ("none", "a")
    rows = [{"kind": kind, "seconds": {"none": 2.0, "a": 1.0}, "acceptance": dict.fromkeys(names, ONE)}] * 6
    ways = [{"name": name, "words": "", "bytes": 0, "training_seconds": 0.0} for name in names]
    entry = {"ways": ways, "kinds": comparison.summarise(rows, names, 0), "compared": 6, "different": 0}
    return {"by_temperature": {"0": entry | {"left_out": 0, "foreign": ""}}}


def test_the_page_has_the_table_the_verdicts_and_the_command():
    text = drafters_page.render("Drafters for x", "x, float32", "python -m pipeline +experiment=drafters", details())
    assert "<h1>Drafters for x</h1>" in text
    assert "<code>python -m pipeline +experiment=drafters</code>" in text
    assert '<th class="text">chat (6)</th>' in text
    assert '<td class="text">2.00 [2.00, 2.00]; 1.50</td>' in text
    assert "<li>chat: a wins, 2.00 [2.00, 2.00].</li>" in text
    assert comparison.LEGEND in text


def test_names_of_categories_are_text():
    text = drafters_page.render("x", "", "", details("<script>alert(1)</script>"))
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_it_ends_another_page():
    text = drafters_page.added("<html><body>\n<p>the report</p>\n</body>\n</html>\n", details())
    assert text.startswith("<html><body>\n<p>the report</p>\n")
    assert text.endswith("</p>\n</body>\n</html>\n")
    assert text.count("<h2>Drafters at temperature 0</h2>") == 1


class Run:
    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def file(self, path) -> None:
        self.kept[path.name] = path.read_text()

    def table(self, columns, name) -> None:
        pass


def test_the_report_of_a_run_shows_its_comparison(tmp_path):
    """On disk and in the tracking store; the stage's own result, which other runs share, stays as it was."""
    context = finished(tmp_path)
    context.output.mkdir()
    entry = context.parent(Stage.speculate).details["by_temperature"]["0"]
    entry |= {"prompts": [{"id": "p"}], "by_position": [0.5]}
    folder = context.parent(Stage.report).folder
    for name in (report.FIGURE, report.TEXT, page.FILE, record.FILE):
        (folder / name).write_text("<body>the report</body>")
    run = Run()
    report.publish(context, run)
    assert run.kept[page.FILE] == "<body>the report</body>"
    compared = replace(context.parent(Stage.report), stage=Stage.drafters, details=details())
    context.artifacts[Stage.drafters] = compared
    report.publish(context, run)
    assert "Drafters at temperature 0" in run.kept[page.FILE]
    assert run.kept[page.FILE] == (context.output / page.FILE).read_text()
    assert (folder / page.FILE).read_text() == "<body>the report</body>"
