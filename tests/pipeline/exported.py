"""A finished run to export from, made by hand: a tiny target, a draft of it, a few answers, and figures of one's choice."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from data.artifact import fingerprint, folder_hash
from data.responses import Request, Response, write_shard
from pipeline import draft as drafts
from pipeline import parity, stock_reader
from pipeline.choices import Stage
from pipeline.config import Config, Export, Target
from pipeline.config import Draft as DraftConfig
from pipeline.context import Artifact, Context
from pipeline.target import TargetFiles
from pipeline.tiny import byte_tokenizer

KEPT = torch.arange(1, 259, 2)  # holds the end id, 1
MEASURED = {
    "by_temperature": {
        "0": {
            "after": {"overlap": 0.5, "top1": 0.6},
            "ratio": {"median": 1.2, "low": 1.1, "high": 1.3},
            "ratio_transformers": {"median": 1.5, "low": 1.4, "high": 1.6},
            "ratio_assisted": {"median": 1.2, "low": 1.1, "high": 1.3},
            "predicted": 1.25,
            "acceptance_rate": 0.45,
            "tokens_per_round": 1.9,
            "plain_tokens_per_second": 40.0,
            "speculative_tokens_per_second": 48.0,
            "draft_tokens": 2,
            "positions": 90,
            "prompts": [{}] * 6,
        }
    },
    "lossless": {"prompts": 6, "different": 0, "oracle_answers": 4, "oracle_different": 0},
}


@dataclass(frozen=True)
class Child:
    """What the stage asks of a tracking run."""

    run_id: str = "0123456789abcdef"


def config_of(family: str, tied: bool = True, rows: int = 259) -> PreTrainedConfig:
    if family == "gpt2":
        return GPT2Config(vocab_size=rows, n_embd=32, n_layer=3, n_head=4, n_positions=128, tie_word_embeddings=tied)
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "gemma": GemmaConfig}[family]
    options = {"qwen3": {"head_dim": 128}, "gemma": {"head_dim": 8}}.get(family, {})
    return kind(
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **options,
    )


def model_of(config: PreTrainedConfig, common: float = 2.0):
    """Random weights whose hidden states share a direction, as trained models' do; vectors that are not one or zero."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
        if not config.tie_word_embeddings:
            model.get_input_embeddings().weight[:] += common
    return model


def responses(count: int = 6) -> list[Response]:
    """Answers of the validation and of the test split, every token of which is in KEPT."""
    rows = []
    for number in range(count):
        split = ("validation", "test")[number % 2]
        draw = torch.Generator().manual_seed(number)
        ids = KEPT[torch.randint(len(KEPT), (24,), generator=draw)].tolist()
        rows.append(Response(Request(number, split, f"p{number}", "kind", 0.0, tuple(ids[:8])), tuple(ids[8:]), False))
    return rows


def finished(
    root: Path,
    family: str = "llama",
    tied: bool = False,
    trimmed: bool = True,
    rows: int = 259,
    name: str = "target",
    tokenizer: Any = None,
    **settings: Any,
) -> Context:
    """The context of a run whose stages up to speculate are done; ``settings`` are those of the group export."""
    model = model_of(config_of(family, tied, rows))
    target = root / name
    model.save_pretrained(target)
    (byte_tokenizer() if tokenizer is None else tokenizer).save_pretrained(target)
    folders = {stage: root / "work" / "artifacts" / stage.name / fingerprint(stage.name) for stage in Stage}
    for folder in folders.values():
        folder.mkdir(parents=True)
    draft = drafts.build(model, DraftConfig(layers=[0, 2]), KEPT if trimmed else None)
    drafts.save(draft, folders[Stage.distil] / "draft")
    write_shard(folders[Stage.generate] / "shard-00000.parquet", responses())
    details = {
        Stage.speculate: copy.deepcopy(MEASURED),
        Stage.distil: {"shape": drafts.shape(draft).__dict__, "vocabulary_coverage": 0.9 if trimmed else 1.0},
    }
    config = Config(target=Target(path=str(target)), export=Export(**settings))
    context = Context(config, root / "work", root / "output")
    context.__dict__["target"] = TargetFiles(name, target, "0" * 16)
    context.__dict__["dtype"] = torch.float32
    for stage in list(Stage)[:7]:
        context.artifacts[stage] = Artifact(
            stage, folders[stage], folders[stage].name, {}, details.get(stage, {}), f"run-{stage.name}"
        )
    measured = folder_hash(folders[Stage.distil] / "draft")
    context.artifacts[Stage.speculate] = replace(context.artifacts[Stage.speculate], draft=measured)
    return context


def stage_folder(context: Context) -> Path:
    return context.work / "artifacts" / "export" / fingerprint("export")


def in_this_process(monkeypatch) -> None:
    """Spare a test the seconds of starting a process: the same script's answers, computed here."""
    monkeypatch.setattr(parity, "in_a_fresh_process", stock_reader.answer)
    monkeypatch.setattr(parity, "PROMPTS", 1)
    monkeypatch.setattr(parity, "NEW_TOKENS", 6)
