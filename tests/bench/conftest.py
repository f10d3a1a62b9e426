"""Benchmarks under test read one package of the standard library and take the number format as probed."""

import sysconfig
from functools import partial
from pathlib import Path

import pytest

from data import standard_library
from pipeline import hardware


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What takes seconds and has its own tests: reading the whole library, probing the processor."""
    folder = Path(sysconfig.get_path("stdlib")) / "email"
    monkeypatch.setattr(standard_library, "read", partial(standard_library.read, folder))
    monkeypatch.setattr(hardware, "bfloat16_gain", lambda: 1.0)
