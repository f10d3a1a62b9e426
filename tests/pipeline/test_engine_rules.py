"""The commands for vLLM and SGLang keep the rules these document, and a pair or a setting that breaks one is named."""

import os
import re
import shlex
from dataclasses import replace

import pytest

from pipeline import export, serve
from pipeline.config import Export
from pipeline.engine_rules import DOCUMENTED, Verdict, sglang, sglang_refusal, verdicts, vllm, vllm_refusal
from tests.pipeline.exported import MEASURED, Child, config_of, finished, in_this_process, stage_folder

FACTS = serve.Facts({name: Verdict(DOCUMENTED, None) for name in ("vLLM", "SGLang")}, "float32", target_in_gguf=False)
PAIR = config_of("llama"), config_of("llama")
PADDED = config_of("qwen2", rows=264), config_of("qwen2", rows=259)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_what_is_written_is_what_the_engines_ask_for(length):
    """By hand from vLLM's page on draft models and SGLang's on STANDALONE; K drafts are verified with the token before."""
    assert vllm(length) == {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": length}
    assert {name.removeprefix("speculative-"): value for name, value in sglang(length).items()} == {
        "algorithm": "STANDALONE", "draft-model-path": "DRAFT", "num-steps": length, "eagle-topk": 1,
        "num-draft-tokens": 1 + length,
    }  # fmt: skip
    assert vllm_refusal(vllm(length), *PAIR) is None
    assert sglang_refusal(sglang(length), *PAIR) is None


@pytest.mark.parametrize("name", list(vllm(2)))
def test_nothing_can_be_left_out_for_vllm(name):
    assert vllm_refusal({key: value for key, value in vllm(2).items() if key != name}, *PAIR) is not None


@pytest.mark.parametrize("name", list(sglang(2)))
def test_nothing_can_be_left_out_for_sglang(name):
    assert sglang_refusal({key: value for key, value in sglang(2).items() if key != name}, *PAIR) is not None


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
    text = serve.instructions(Export(), MEASURED["by_temperature"], FACTS)
    [command] = re.findall(r"^python -m sglang.*?(?=^```)", text, re.MULTILINE | re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "TARGET"]
    assert {name.removeprefix("--"): value for name, value in zip(words[5::2], words[6::2], strict=True)} == {
        name: str(value) for name, value in sglang(2).items()
    }


def test_a_refusal_is_in_the_heading():
    verdicts = {"vLLM": Verdict(DOCUMENTED, "vocab_size is 1"), "SGLang": Verdict(DOCUMENTED, None)}
    text = serve.instructions(Export(), MEASURED["by_temperature"], replace(FACTS, verdicts=verdicts))
    assert "## vLLM: not run; refused by its documented rules: vocab_size is 1" in text
    assert "## SGLang: not run; accepted by its documented rules" in text


@pytest.mark.parametrize("rows", [259, 264])
def test_every_export_keeps_the_rules(tmp_path, monkeypatch, rows):
    in_this_process(monkeypatch)
    context = finished(tmp_path, "qwen2", rows=rows)
    export.run(context, stage_folder(context), Child())
    text = (stage_folder(context) / "draft" / "serve.md").read_text()
    assert text.count("not run; accepted by its documented rules") == 2


CLASSES = {
    "vllm/__init__.py": "",
    "vllm/config.py": """
from dataclasses import dataclass
@dataclass
class ModelConfig:
    model: str
class ParallelConfig: ...
@dataclass
class SpeculativeConfig:
    target_model_config: ModelConfig
    target_parallel_config: ParallelConfig
    method: str
    model: str
    num_speculative_tokens: int
    def __post_init__(self):
        if self.num_speculative_tokens > 4:
            raise ValueError(f"no more than 4 for {self.model} after {self.target_model_config.model}")
""",
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/server_args.py": """
from dataclasses import dataclass
@dataclass
class ServerArgs:
    model_path: str
    speculative_algorithm: str
    speculative_draft_model_path: str
    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
""",
    "vllm-9.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.1\n",
    "sglang-9.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 9.2\n",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Packages of the engines' names, whose classes take the fields that the engines' take, and two model folders."""
    for name, text in CLASSES.items():
        (tmp_path / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "packages" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)
    for name in ("target", "draft"):
        PAIR[0].save_pretrained(tmp_path / name)
    return tmp_path


def said(installed, length=2, pair=PAIR):
    found = verdicts(length, installed / "target", installed / "draft", pair[1])
    return {name: (verdict.by, verdict.refusal) for name, verdict in found.items()}


def test_an_engine_that_is_installed_is_asked_itself(installed):
    assert said(installed) == {
        "vLLM": ("the configuration classes of vllm 9.1", None),
        "SGLang": ("the configuration classes of sglang 9.2", None),
    }


def test_the_words_of_its_classes_are_quoted_without_places(installed):
    assert said(installed, 5)["vLLM"] == (
        "the configuration classes of vllm 9.1", "ValueError: no more than 4 for DRAFT after TARGET"
    )  # fmt: skip


def test_a_setting_that_its_classes_do_not_know_is_refused(installed):
    path = installed / "packages" / "sglang" / "srt" / "server_args.py"
    path.write_text(path.read_text().replace("speculative_eagle_topk", "speculative_topk"))
    assert "unexpected keyword argument 'speculative_eagle_topk'" in said(installed)["SGLang"][1]


def test_an_engine_that_cannot_be_imported_is_judged_by_its_rules(installed):
    (installed / "packages" / "vllm" / "config.py").write_text("raise RuntimeError('no GPU')")
    assert said(installed)["vLLM"] == (DOCUMENTED, None)


def test_its_classes_do_not_overrule_the_rules(installed):
    by, refusal = said(installed, pair=(PAIR[0], config_of("llama", rows=264)))["vLLM"]
    assert (by, refusal) == (DOCUMENTED, "vocab_size is 259 in the target and 264 in the draft")


def test_without_safetensors_its_classes_are_not_asked(installed):
    (installed / "draft" / "config.json").unlink()
    assert said(installed)["SGLang"] == (DOCUMENTED, None)
