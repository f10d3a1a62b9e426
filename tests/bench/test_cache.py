"""The cache benchmark runs on a tiny model, whole or in parts, and ends with one line of JSON that holds its keys."""

import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from data.responses import read_shards
from pipeline import tiny
from tests.bench import cache, subject, text

PARTS = {
    "fidelity": {"topk_bytes_per_token", "topk_overlap_error", "small_bytes_per_token", "small_overlap_error",
                 "hidden_bytes_per_token", "hidden_kl", "renormalised_cap"},
    "drafts": {"topk_draft_overlap_loss", "small_draft_overlap_loss", "hidden_draft_overlap_loss"},
    "write": {"write_share_of_forward"},
    "read": {"read_over_consume"},
    "memory": {"reader_rss_growth_mb"},
}  # fmt: skip
EVER = {"positions", "environment"}


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Runs the benchmark on a tiny model with more options; gives its last line."""
    tiny.make(tmp_path / "target", seed=0)

    def run(*more: str) -> dict:
        given = ["--target", str(tmp_path / "target"), "--work", str(tmp_path), "--positions", "60", "--tokens", "6"]
        given += ["--synthetic", "20000", "--steps", "2", "--vocabulary", "64", *more]
        monkeypatch.setattr(sys, "argv", ["bench", *given])
        cache.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_it_runs_and_ends_with_its_keys(bench):
    line = bench()
    assert set(line) == EVER.union(*PARTS.values())
    assert all(math.isfinite(value) for key, value in line.items() if key not in EVER)
    assert line["small_bytes_per_token"] < line["topk_bytes_per_token"]
    assert line["hidden_kl"] < 1e-2
    assert line["positions"] >= 60


def test_parts_give_their_keys_alone_and_text_that_exists_is_not_written_again(bench, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    text.write(model, [[5, 6, 7]] * 40, 90, 4, tmp_path / "text")
    monkeypatch.setattr(text, "write", None)
    line = bench("--text", str(tmp_path / "text"), "--only", "write,fidelity")
    assert set(line) == EVER | PARTS["write"] | PARTS["fidelity"]


def test_text_too_short_and_unknown_parts_are_refused(bench, tmp_path, capsys):
    (tmp_path / "text").mkdir()
    with pytest.raises(ValueError, match=r"text holds 0 tokens at temperature 1, fewer than the 72 that --positions asks for"):
        bench("--text", str(tmp_path / "text"), "--only", "fidelity")
    with pytest.raises(SystemExit):
        bench("--only", "fidelity,speed")
    assert "speed: the parts are fidelity, drafts, write, read, memory" in capsys.readouterr().err


def test_an_answer_ends_at_eos_and_equal_prompts_of_all_batches_get_answers_of_their_own(tmp_path, monkeypatch):
    tiny.make(tmp_path / "target", seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    monkeypatch.setattr(text, "AT_ONCE", 2)
    text.write(model, [[5, 6, 7]] * 4, 32, 8, tmp_path / "free")
    free = [row.tokens for row in read_shards(tmp_path / "free")]
    assert len(set(free)) == 4
    eos = free[0][2]
    text.write(model, [[5, 6, 7]] * 4, 32, 8, tmp_path / "ended", [eos])
    ended = list(read_shards(tmp_path / "ended"))
    assert ended[0].tokens == free[0][: free[0].index(eos) + 1]
    assert [row.stopped for row in ended] == [eos in tokens for tokens in free]


def test_drafts_are_compared_where_the_target_wrote_in_bfloat16(bench, monkeypatch):
    chosen = subject.chosen
    monkeypatch.setattr(subject, "chosen", lambda options: (chosen(options)[0], torch.bfloat16))
    line = bench("--only", "drafts")
    assert all(math.isfinite(line[key]) for key in PARTS["drafts"])
