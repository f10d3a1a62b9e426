"""Every notebook runs, cell by cell, on the store of a smoke run."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, smoke):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "notebooks are kept without outputs"
    names: dict[str, object] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
        if "parameters" in cell["metadata"].get("tags", []):
            names["work"] = smoke.work
    assert names["runs"]
    if "shown" in names:
        assert names["counts"]["rejected"]
        assert names["counts"]["accepted"] + names["counts"]["target"] == sum(len(r.tokens) for r in names["greedy"])
        assert names["shown"]._repr_html_().count("class='rejected'") == names["counts"]["rejected"] + 1, "the legend has one"
        assert names["faint"]._repr_html_().count("title=") == sum(len(r.tokens) for r in names["sampled"])
