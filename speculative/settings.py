"""transformers' generation configuration, read into this library's settings, or refused by name.

A field that is set and has no exact counterpart here is an error: ignoring it would change the output in silence.
"""

from dataclasses import dataclass

import torch
from transformers import (
    GenerationConfig,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from speculative.controls import Controls, Processor
from speculative.sampling import Sampling

READ = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "min_new_tokens",
    "max_new_tokens", "max_length", "eos_token_id", "stop_strings", "bad_words_ids", "sequence_bias", "suppress_tokens",
    "no_repeat_ngram_size",
}  # fmt: skip
WITHOUT_EFFECT = {
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "cache_implementation", "cache_config",
    "max_cache_len", "transformers_version", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "is_assistant", "disable_compile",
    "compile_config", "return_dict_in_generate", "output_scores", "output_logits", "prefill_chunk_size", "low_memory",
    "remove_invalid_values", "length_penalty", "early_stopping",
}  # fmt: skip
NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "guidance_scale": 1.0, "min_length": 0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0, "renormalize_logits": False, "token_healing": False, "output_attentions": False,
    "output_hidden_states": False,
}  # fmt: skip
DEFAULT_TOP_K = 50  # of transformers' generate when it samples and the field is unset


@dataclass(frozen=True)
class Settings:
    """What a generation configuration says; None where it says nothing."""

    sampling: Sampling
    controls: Controls
    max_new_tokens: int | None
    max_length: int | None
    eos_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]


def read(config: GenerationConfig) -> Settings:
    """The settings of ``config``, unset fields as transformers' ``generate`` would fill them.

    Raises:
        ValueError: a field that is set and not supported, by name.
    """
    given = {name: value for name, value in config.to_dict().items() if value is not None and not name.startswith("_")}
    strange = [
        f"{name}={value!r}"
        for name, value in given.items()
        if name not in READ | WITHOUT_EFFECT and not (name in NEUTRAL and value == NEUTRAL[name])
    ]
    if strange:
        raise ValueError(
            f"generation_config: {', '.join(strange)} cannot be decoded exactly here; unset it, or use transformers' generate"
        )
    sampling = Sampling(temperature=0.0)
    if given.get("do_sample"):
        names = ("temperature", "top_p", "min_p", "typical_p")
        options = {name: given[name] for name in names if name in given}
        sampling = Sampling(top_k=given.get("top_k", DEFAULT_TOP_K), **options)
    eos = given.get("eos_token_id", [])
    stops = given.get("stop_strings", [])
    eos, stops = [eos] if isinstance(eos, int) else eos, [stops] if isinstance(stops, str) else stops
    controls = Controls(
        repetition_penalty=given.get("repetition_penalty", 1.0),
        min_new_tokens=given.get("min_new_tokens", 0),
        processors=_processors(given, eos),
    )
    return Settings(sampling, controls, given.get("max_new_tokens"), given.get("max_length"), tuple(eos), tuple(stops))


def _processors(given: dict, eos: list[int]) -> tuple[Processor, ...]:
    """transformers' own processors for fields that have one without a state."""
    found: list[Processor] = []
    if given.get("sequence_bias"):
        found.append(SequenceBiasLogitsProcessor(given["sequence_bias"]))
    if given.get("bad_words_ids"):
        found.append(NoBadWordsLogitsProcessor(given["bad_words_ids"], torch.tensor(eos) if eos else None))
    if given.get("no_repeat_ngram_size"):
        found.append(NoRepeatNGramLogitsProcessor(given["no_repeat_ngram_size"]))
    if given.get("suppress_tokens"):
        found.append(SuppressTokensLogitsProcessor(given["suppress_tokens"]))
    return tuple(found)
