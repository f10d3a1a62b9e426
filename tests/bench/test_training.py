"""The training benchmark runs its own side on a tiny model; TRL's figures are given, since tests fetch nothing."""

import json
import math
import sys

import pytest
import torch

from pipeline import tiny
from tests.bench import training

THEIRS = {"seconds": 4.0, "tokens": 100, "memory_mb": 1e6}


def test_it_ends_with_its_keys_and_divides_what_was_measured(tmp_path, monkeypatch, capsys):
    tiny.make(tmp_path / "target", seed=0)
    real, found = training.measure, {}
    ballast = torch.ones(300_000_000)

    def measure(side, folder, batch, dtype, extra=None):
        if side == "theirs":
            return THEIRS
        found.update(real(side, folder, batch, dtype, extra))
        return found

    monkeypatch.setattr(training, "measure", measure)
    places = ["--target", str(tmp_path / "target"), "--work", str(tmp_path), "--trl", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", *places, "--rows", "8", "--tokens", "5", "--batch", "2"])
    training.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    shares = [line[f"{phase}_share"] for phase in training.PHASES]
    assert sum(shares) == pytest.approx(1)
    assert all(0 < share < 1 for share in shares)
    assert line["tokens_per_s_vs_trl"] == pytest.approx(found["tokens"] / found["seconds"] / 25)
    assert line["memory_vs_trl"] == pytest.approx(found["memory_mb"] / 1e6)
    assert 0 < line["memory_vs_trl"] < 1
    assert 100 < found["memory_mb"] < ballast.nbytes / 1e6  # its own memory, and not that of this process
    assert 0 < found["tokens"] <= 6 * 5  # the first of four batches is a warm-up
    assert not math.isnan(line["load_share"])
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["target"]


@pytest.mark.slow  # it starts a process that loads transformers
def test_a_side_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"ours failed:(?s:.*)draft"):
        training.measure("ours", tmp_path, 2, torch.float32)
