"""The cache benchmark runs on a tiny model and ends with one line of JSON that holds its keys."""

import json
import math
import sys

from pipeline import tiny
from tests.bench import cache

KEYS = {
    "topk_bytes_per_token", "topk_overlap_error", "topk_draft_overlap_loss", "small_bytes_per_token",
    "small_draft_overlap_loss", "hidden_bytes_per_token", "hidden_kl", "write_share_of_forward", "read_over_consume",
    "reader_rss_growth_mb",
}  # fmt: skip


def test_it_runs_and_ends_with_its_keys(tmp_path, monkeypatch, capsys):
    tiny.make(tmp_path / "target", seed=0)
    places = ["--target", str(tmp_path / "target"), "--work", str(tmp_path)]
    monkeypatch.setattr(
        sys,
        "argv",
        ["bench", *places, "--positions", "60", "--tokens", "6", "--synthetic", "20000", "--steps", "2", "--vocabulary", "64"],
    )
    cache.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(line) >= KEYS
    assert all(math.isfinite(line[key]) for key in KEYS)
    assert line["small_bytes_per_token"] < line["topk_bytes_per_token"]
    assert line["hidden_kl"] < 1e-2
