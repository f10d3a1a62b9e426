"""The comparison of drafters for the eye: a page of its own, and a part of the report of the run that made it.

Names of categories come from the user's file: the templates escape them. What the cells say is ``pipeline.comparison``'s.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from pipeline import comparison, lossy

END = "</body>"


def render(title: str, where: str, command: str, details: dict[str, Any]) -> str:
    """The page; ``where`` says on what it was measured."""
    return _template("drafters.html").render(title=title, where=where, command=command, details=details)


def added(report: str, details: dict[str, Any]) -> str:
    """The page ``report`` with the tables at its end."""
    before, end, after = report.rpartition(END)
    return before + _template("drafters_table.html").render(details=details) + "\n" + end + after


def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    tools = (comparison.table, comparison.verdict, comparison.lossless, comparison.notes)
    environment.globals |= {tool.__name__: tool for tool in tools} | {"legend": comparison.LEGEND, "mark": lossy.mark}
    environment.globals["loss"] = lambda entry: lossy.words(entry[lossy.LABEL])
    return environment.get_template(name)
