"""How vLLM and SGLang are told to use a draft, and the rules by which they would refuse it.

Where one is installed, its own configuration classes are built in a process of their own (``engine_classes``). Else the
rules are those that their documentation and these classes state (vLLM: SpeculativeConfig and the draft-model proposer;
SGLang: its server arguments; read in 2026). A pair that either accepts has not been run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from pipeline.engine_classes import ask

DOCUMENTED = "its documented rules"

VLLM_KEYS = {"method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "max_model_len"}  # those a draft needs


@dataclass(frozen=True)
class Verdict:
    """Why an engine would refuse a draft, None if it would not, ``by`` its documented rules or its classes."""

    by: str
    refusal: str | None


def vllm(length: int) -> dict[str, Any]:
    """The value of ``--speculative-config``: ``length`` drafted tokens a round, the draft as parallel as the target."""
    return {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": length}


def sglang(length: int) -> dict[str, Any]:
    """SGLang's flags for a chain of ``length`` drafted tokens; it counts the token that every round verifies as one more."""
    return {
        "speculative-algorithm": "STANDALONE",
        "speculative-draft-model-path": "DRAFT",
        "speculative-num-steps": length,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": length + 1,
    }


def vllm_refusal(settings: dict[str, Any], target: PreTrainedConfig, draft: PreTrainedConfig, parallel: int = 1) -> str | None:
    """Why vLLM would refuse these ``settings`` for this pair at tensor-parallel size ``parallel``, None if it would not."""
    strange = sorted(set(settings) - VLLM_KEYS)
    own = settings.get("draft_tensor_parallel_size", parallel)
    if strange:
        return f"{strange[0]} is no key that it knows of a draft model"
    if not settings.get("model"):
        return "model is missing, and no draft is loaded"
    if settings.get("method") != "draft_model":
        return "method is not draft_model, and another kind of draft is looked for in these files"
    if settings.get("num_speculative_tokens", 0) < 1:
        return "num_speculative_tokens is below 1"
    if own != parallel:
        return f"draft_tensor_parallel_size is {own} and the target's tensor-parallel size is {parallel}"
    return _other_vocabulary(target, draft)


def sglang_refusal(settings: dict[str, Any], target: PreTrainedConfig, draft: PreTrainedConfig) -> str | None:
    """Why SGLang would refuse these ``settings`` for this pair, or change them, None if it would not."""
    steps, width, drafted = (settings.get(f"speculative-{name}") for name in ("num-steps", "eagle-topk", "num-draft-tokens"))
    if settings.get("speculative-algorithm") != "STANDALONE":
        return "speculative-algorithm is not STANDALONE, and another kind of draft is looked for in these files"
    if not settings.get("speculative-draft-model-path"):
        return "speculative-draft-model-path is missing, and no draft is loaded"
    if None in (steps, width, drafted):
        return "num-steps, eagle-topk and num-draft-tokens are given together or not at all"
    if steps < 1:
        return "speculative-num-steps is below 1"
    if width == 1 and drafted != steps + 1:
        return f"speculative-num-draft-tokens is {drafted}, and a chain of {steps} steps has {steps + 1}"
    return _other_vocabulary(target, draft)


def _other_vocabulary(target: PreTrainedConfig, draft: PreTrainedConfig) -> str | None:
    """Both engines take the rows of the config for the vocabulary, padding included."""
    sizes = target.get_text_config().vocab_size, draft.vocab_size
    return None if sizes[0] == sizes[1] else f"vocab_size is {sizes[0]} in the target and {sizes[1]} in the draft"


def verdicts(length: int, target: Path, draft: Path, config: PreTrainedConfig) -> dict[str, Verdict]:
    """What each engine, by its name, says to the settings above for the models in two folders; ``config`` is the draft's.

    Classes look at files, so without safetensors in ``draft`` the rules alone are asked. These know what the classes leave
    to the loading of weights, a vocabulary of another size, so what they refuse stays refused.
    """
    of_target = AutoConfig.from_pretrained(target, trust_remote_code=False)
    found = {
        "vLLM": Verdict(DOCUMENTED, vllm_refusal(vllm(length), of_target, config)),
        "SGLang": Verdict(DOCUMENTED, sglang_refusal(sglang(length), of_target, config)),
    }
    settings = {
        "vLLM": vllm(length) | {"model": str(draft)},
        "SGLang": sglang(length) | {"model-path": str(target), "speculative-draft-model-path": str(draft)},
    }
    for name, verdict in found.items():
        own = None if verdict.refusal or not (draft / "config.json").is_file() else ask(name, settings[name], target)
        if own is not None:
            words = own.refusal and own.refusal.replace(str(draft), "DRAFT").replace(str(target), "TARGET")
            found[name] = Verdict(f"the configuration classes of {own.version}", words)
    return found
