"""What this machine is and which number format is fast on it. Probed once, then remembered beside the results."""

import json
import os
import platform
import time
from pathlib import Path

import torch
from filelock import FileLock

from data.artifact import write_json
from pipeline.choices import Precision

CLEAR_GAIN = 1.3  # bfloat16 must beat float32 by this factor: a borderline probe would flip from run to run


def machine() -> dict[str, str | int]:
    """The facts that speed depends on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    facts: dict[str, str | int] = {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


def dtype_of(precision: Precision, work: Path) -> torch.dtype:
    """The torch dtype for a configured precision; ``auto`` is probed once for each machine and kept in ``work``."""
    if precision is not Precision.auto:
        return {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16}[precision]
    path, facts = work / "machine.json", machine()
    with FileLock(path.with_suffix(".lock")):  # jobs of a sweep must not find differently
        known = json.loads(path.read_text()) if path.is_file() else {}
        if known.get("machine") != facts:
            known = {"machine": facts, "bfloat16_gain": round(bfloat16_gain(), 2)}
            write_json(path, known)
    return torch.bfloat16 if known["bfloat16_gain"] >= CLEAR_GAIN else torch.float32


def bfloat16_gain() -> float:
    """Time of a float32 matrix product ÷ time of the same in bfloat16; best of several, interleaved."""
    if torch.cuda.is_available():
        return CLEAR_GAIN if torch.cuda.is_bf16_supported(including_emulation=False) else 0.0
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    operands = {dtype: (torch.randn(256, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)) for dtype in best}
    for _ in range(8):
        for dtype, (left, right) in operands.items():
            started = time.perf_counter()
            left @ right
            best[dtype] = min(best[dtype], time.perf_counter() - started)
    return best[torch.float32] / best[torch.bfloat16]
