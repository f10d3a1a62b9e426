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
