"""Who may import whom: the library of the algorithm and the code about data stand alone, each tool has one file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("speculative", "data", "pipeline", "conf")
LONGEST = 300  # lines of a file

APPLICATION = ("pipeline", "conf", "hydra", "omegaconf", "mlflow")
# Modules that nothing in a folder may import.
BANNED = {
    "speculative": (*APPLICATION, "data", "lightning", "pytorch_lightning"),
    "data": (*APPLICATION, "speculative"),
}
# Modules that one file alone may import.
RESERVED = {
    "mlflow": "pipeline/tracking.py",
    "hydra": "pipeline/main.py",
    "omegaconf": "pipeline/main.py",
    "transformers.cache_utils": "speculative/slots.py",
}

FILES = sorted(p.relative_to(ROOT).as_posix() for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def imported(source: str, file: str) -> set[str]:
    """Dotted names of everything that a file imports, at any depth, relative or by a literal name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = file.split("/")[: -node.level] if node.level else []
            base = [*package, *([node.module] if node.module else [])]
            found |= {".".join(base)} | {".".join([*base, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return found


def violations(source: str, file: str) -> list[str]:
    """The banned modules that a file imports, sorted."""
    banned = set(BANNED.get(file.split("/")[0], ()))
    banned |= {module for module, owner in RESERVED.items() if owner != file}
    names = imported(source, file)
    return sorted(module for module in banned if any(n == module or n.startswith(f"{module}.") for n in names))


@pytest.mark.parametrize("file", FILES)
def test_the_walls_stand(file):
    assert violations((ROOT / file).read_text(), file) == []


@pytest.mark.parametrize("file", [f for f in FILES if not f.startswith("conf/")])
def test_a_file_can_be_read_at_one_sitting(file):
    assert len((ROOT / file).read_text().splitlines()) <= LONGEST


def test_the_files_that_matter_are_looked_at():
    assert {"speculative/engine.py", "data/batching.py", "pipeline/draft.py", *RESERVED.values()} <= set(FILES)


@pytest.mark.parametrize(("module", "owner"), RESERVED.items())
def test_each_tool_is_used_where_it_may_be(module, owner):
    names = imported((ROOT / owner).read_text(), owner)
    assert any(name == module or name.startswith(f"{module}.") for name in names)


@pytest.mark.parametrize(
    ("source", "file", "caught"),
    [
        ("import mlflow", "pipeline/distil.py", ["mlflow"]),
        ("def f():\n    from mlflow.tracking import MlflowClient", "pipeline/flow.py", ["mlflow"]),
        ("import torch, hydra.core as h", "pipeline/config.py", ["hydra"]),
        ("from omegaconf import OmegaConf", "pipeline/main.py", []),
        ("from data import responses", "speculative/engine.py", ["data"]),
        ("from data.responses import Request", "speculative/engine.py", ["data"]),
        ("import datasets", "speculative/engine.py", []),
        ("from speculative import Draft", "data/batching.py", ["speculative"]),
        ("from .. import pipeline", "data/x.py", ["pipeline"]),
        ("from ..pipeline.draft import build", "speculative/x.py", ["pipeline"]),
        ("from . import prompts", "data/splits.py", []),
        ("if True:\n    import lightning.pytorch", "speculative/x.py", ["lightning"]),
        ("import lightning", "data/x.py", []),
        ("from transformers import cache_utils", "pipeline/race.py", ["transformers.cache_utils"]),
        ("from transformers.cache_utils import Cache", "speculative/drafters.py", ["transformers.cache_utils"]),
        ("from transformers.cache_utils import Cache", "speculative/slots.py", []),
        ("import importlib\nimportlib.import_module('mlflow.entities')", "pipeline/race.py", ["mlflow"]),
        ("__import__('pipeline')", "data/x.py", ["pipeline"]),
        ("from omegaconf import OmegaConf\nimport hydra", "speculative/x.py", ["hydra", "omegaconf"]),
    ],
)
def test_a_planted_violation_is_caught(source, file, caught):
    assert violations(source, file) == caught
