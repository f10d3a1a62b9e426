"""How vLLM and SGLang are told to use a draft, and the rules by which they would refuse it, checked without them.

Both serve on GPUs and are not installed here. The rules are those that their documentation and their configuration
classes state (vLLM: SpeculativeConfig and the draft-model proposer; SGLang: its server arguments; read in 2026). A pair
that keeps them has not been run by either.
"""

from typing import Any

from transformers import PreTrainedConfig

VLLM_KEYS = {"method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "max_model_len"}  # those a draft needs


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


def refusals(length: int, target: PreTrainedConfig, draft: PreTrainedConfig) -> dict[str, str | None]:
    """What each engine would say to the settings above, by its name."""
    return {
        "vLLM": vllm_refusal(vllm(length), target, draft),
        "SGLang": sglang_refusal(sglang(length), target, draft),
    }
