"""The commands for vLLM and SGLang keep the rules these document, and a pair or a setting that breaks one is named."""

import re
import shlex

import pytest

from pipeline import engine_rules, export, serve
from pipeline.config import Export
from pipeline.engine_rules import sglang, sglang_refusal, vllm, vllm_refusal
from tests.pipeline.exported import MEASURED, Child, config_of, finished, in_this_process, stage_folder

PAIR = config_of("llama"), config_of("llama")
PADDED = config_of("qwen2", rows=264), config_of("qwen2", rows=259)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_what_is_written_is_taken(length):
    assert engine_rules.refusals(length, *PAIR) == {"vLLM": None, "SGLang": None}


@pytest.mark.parametrize(
    ("change", "pair", "said"),
    [
        ({"method": "eagle"}, PAIR, "method is not draft_model"),
        ({"num_speculative_tokens": 0}, PAIR, "num_speculative_tokens is below 1"),
        ({"num_drafts": 2}, PAIR, "num_drafts is no key that it knows"),
        ({"draft_tensor_parallel_size": 1}, PAIR, "draft_tensor_parallel_size is 1 and the target's tensor-parallel size is 2"),
        ({"draft_tensor_parallel_size": 2}, PAIR, None),
        ({}, PADDED, "vocab_size is 264 in the target and 259 in the draft"),
    ],
)
def test_the_rules_of_vllm(change, pair, said):
    found = vllm_refusal(vllm(2) | change, *pair, parallel=2)
    assert found is None if said is None else found.startswith(said)


@pytest.mark.parametrize(
    ("change", "pair", "said"),
    [
        ({"speculative-algorithm": "EAGLE"}, PAIR, "speculative-algorithm is not STANDALONE"),
        ({"speculative-num-steps": None}, PAIR, "num-steps, eagle-topk and num-draft-tokens are given together"),
        ({"speculative-num-steps": 0, "speculative-num-draft-tokens": 1}, PAIR, "speculative-num-steps is below 1"),
        ({"speculative-num-draft-tokens": 2}, PAIR, "speculative-num-draft-tokens is 2, and a chain of 2 steps has 3"),
        ({"speculative-eagle-topk": 2, "speculative-num-draft-tokens": 6}, PAIR, None),  # a tree may have any number
        ({}, PADDED, "vocab_size is 264 in the target and 259 in the draft"),
    ],
)
def test_the_rules_of_sglang(change, pair, said):
    found = sglang_refusal(sglang(2) | change, *pair)
    assert found is None if said is None else found.startswith(said)


def test_the_command_that_is_printed_is_the_one_that_was_checked():
    text = serve.instructions(Export(), MEASURED["by_temperature"], engine_rules.refusals(2, *PAIR))
    [command] = re.findall(r"^python -m sglang.*?(?=^```)", text, re.MULTILINE | re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "TARGET"]
    assert {name.removeprefix("--"): value for name, value in zip(words[5::2], words[6::2], strict=True)} == {
        name: str(value) for name, value in sglang(2).items()
    }


def test_a_refusal_is_in_the_heading():
    text = serve.instructions(Export(), MEASURED["by_temperature"], {"vLLM": "vocab_size is 1", "SGLang": None})
    assert "## vLLM: not run; refused by its documented rules: vocab_size is 1" in text
    assert "## SGLang: not run; its documented rules are met" in text


@pytest.mark.parametrize("rows", [259, 264])
def test_every_export_keeps_the_rules(tmp_path, monkeypatch, rows):
    in_this_process(monkeypatch)
    context = finished(tmp_path, "qwen2", rows=rows)
    export.run(context, stage_folder(context), Child())
    text = (stage_folder(context) / "draft" / "serve.md").read_text()
    assert text.count("not run; its documented rules are met") == 2
