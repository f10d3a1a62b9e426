"""The benchmarks run on a tiny model and end with one line of JSON that holds their keys; the figures mean nothing here."""

import json
import sys

import pytest

from pipeline import tiny
from tests.bench import decoding, generation, prompts

KEYS = {
    generation: {"batch_generation_ratio", "environment"},
    decoding: {
        "plain_b1_eager", "plain_b1_packed", "plain_b1_compiled", "plain_b32", "assisted_b1_greedy", "assisted_b1_sampled",
        "batch8_ratio", "bookkeeping_share", "auto_k_worst_ratio", "auto_k_of_best_fixed", "prediction_error",
        "environment",
    },
}  # fmt: skip
OPTIONS = {generation: ["--batch", "4", "--tokens", "4", "--repeats", "1"], decoding: ["--count", "3", "--tokens", "6"]}


@pytest.mark.parametrize("bench", KEYS, ids=lambda bench: bench.__name__.split(".")[-1])
def test_it_runs_and_ends_with_its_keys(bench, tmp_path, monkeypatch, capsys):
    tiny.make(tmp_path / "target", seed=0)
    places = ["--target", str(tmp_path / "target"), "--work", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", *places, *OPTIONS[bench]])
    bench.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert KEYS[bench] <= set(json.loads(last))


def test_prompts_are_read_from_lines_with_turns_or_prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a", "b"]}\n{"prompt": "c"}\n\n{"prompt": "d"}\n')
    assert prompts.read(file, 3) == ["a", "c", "d"]
    assert prompts.read(file, 1) == ["a"]
