"""vLLM's and SGLang's own configuration classes, asked whether they take the settings for a draft.

They are asked in a process of their own, for importing them starts much that has no place here. An engine that is not
installed, or that cannot be imported on this machine, is not asked. Also the script of that process: it imports nothing of
Draftsmith.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = {"vLLM": "vllm", "SGLang": "sglang"}
NOT_IMPORTED = 3  # exit code
SECONDS = 300


@dataclass(frozen=True)
class Answer:
    """The package and its version, and its words if its classes refuse, None if they do not."""

    version: str
    refusal: str | None


def ask(engine: str, settings: dict[str, Any], target: Path) -> Answer | None:
    """What the installed ``engine`` says to ``settings`` (paths filled in); None where there is none to ask."""
    package = PACKAGES[engine]
    try:
        found = f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
    order = json.dumps({"engine": engine, "settings": settings, "target": str(target)})
    command = [sys.executable, "-P", __file__, order]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == NOT_IMPORTED:
        return None
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Answer(found, last if done.returncode else None)


def build(engine: str, settings: dict[str, Any], target: str) -> None:
    """Build the classes; whatever they raise is their refusal."""
    try:
        if engine == "vLLM":
            from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

            pair = {"target_model_config": ModelConfig(model=target), "target_parallel_config": ParallelConfig()}
        else:
            from sglang.srt.server_args import ServerArgs
    except Exception as error:  # a library for a GPU that is not there fails in ways of its own
        print(error, file=sys.stderr)
        sys.exit(NOT_IMPORTED)
    if engine == "vLLM":
        SpeculativeConfig(**pair, **settings)
    else:
        ServerArgs(**{name.replace("-", "_"): value for name, value in settings.items()})


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    build(order["engine"], order["settings"], order["target"])
