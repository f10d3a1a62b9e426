"""What the store shows of an execution beside its figures: a name to find it by, its settings, the program's commit."""

import subprocess
from pathlib import Path


def run_name(overrides: list[str]) -> str:
    """What sets a run apart from others in a list: its overrides, less those that only say where things lie."""
    shown = [text.lstrip("+") for text in overrides if not text.startswith(("paths.", "tracking.", "stages=", "hydra."))]
    shown.sort(key=lambda text: text.startswith("experiment="))  # a list shows the beginning, where runs should differ
    return " ".join(shown)[:200] or "default"


def git_sha() -> str:
    """The commit that the program stands at, or "unknown"."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def nested(flat: dict[str, object]) -> dict[str, object]:
    """The tree that dotted keys came from."""
    tree: dict[str, object] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})  # type: ignore[assignment]
        node[leaf] = value
    return tree
