"""What is said of a draft before training, by hand."""

import pytest
import torch
from rich.console import Console

from pipeline import outlook
from pipeline.config import Draft as DraftConfig
from pipeline.draft import build
from tests.pipeline.test_draft import KEPT, tiny

# One layer of ``tiny``: q and o 16·16, k and v 16·8, three MLP matrices 16·32, two norms of 16.
LAYER = 2 * 256 + 2 * 128 + 3 * 512 + 2 * 16
TARGET = 4 * LAYER + 16 + 50 * 16
DRAFT = LAYER + 16 + 5 * 16


def test_costs_are_the_bytes_that_a_step_reads():
    found = outlook.foresee(build(tiny(), DraftConfig(layers=[0]), KEPT), tiny(), torch.bfloat16)
    assert found.costs.draft == pytest.approx(DRAFT / TARGET)
    assert found.costs.round(3) == pytest.approx(3 * DRAFT / TARGET + 1)
    # One draft and free verification: 1 + a tokens for 1 + c steps.
    assert found.break_even == pytest.approx(DRAFT / TARGET, abs=2e-4)


def test_a_draft_as_dear_as_its_target_never_breaks_even():
    found = outlook.foresee(build(tiny(), DraftConfig(layers=[]), None), tiny(), torch.float32)
    assert found.costs.draft == pytest.approx(1.0)
    assert found.break_even == 1.0


def test_the_table_says_size_bytes_cost_and_break_even(monkeypatch):
    console = Console(record=True, width=120)
    monkeypatch.setattr(outlook, "Console", lambda: console)
    outlook.show(outlook.foresee(build(tiny(), DraftConfig(layers=[0]), KEPT), tiny(), torch.bfloat16))
    text = console.export_text()
    for part in (f"{DRAFT + 50 * 16:,}", f"{TARGET:,}", "0.0 MB", f"{DRAFT / TARGET:.3f}", "overlap to break even"):
        assert part in text
