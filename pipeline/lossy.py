"""What of a run is lossy, and by how much.

Typical acceptance (decoding.verification=typical) does not keep the target's law above temperature 0. Whatever shows a
figure that was decoded so takes its label from here, and its distance from the target. It knows no stage and no file.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.choices import Verification
from pipeline.config import Decoding
from pipeline.statistics import mean_interval
from speculative import Sampling, Typical
from speculative.sampling import probabilities
from speculative.typical import excess

LABEL = "lossy"
THRESHOLDS = ("typical_epsilon", "typical_delta")
EXACT = ("plain", "none")  # what a race and a comparison call decoding without drafts


def typical(config: Decoding) -> Typical | None:
    """The thresholds of the lossy rule, None where the rule is exact."""
    return Typical(config.typical_epsilon, config.typical_delta) if config.verification is Verification.typical else None


def rule(config: Decoding) -> dict[str, Any]:
    """How drafts are judged, as options of ``speculative.generate``."""
    return {"verification": config.verification.name, "typical": typical(config)}


def thresholds_used(config: Decoding) -> dict[str, float]:
    """For the identity of a result: the keys of the lossy rule, none where the rule is exact."""
    return {name: getattr(config, name) for name in THRESHOLDS if typical(config)}


def without_unused(fields: dict[str, Any], config: Decoding) -> dict[str, Any]:
    """``fields`` of ``config`` without those that shape no result under its rule."""
    return {name: value for name, value in fields.items() if name not in THRESHOLDS} | thresholds_used(config)


def typical_at(config: Decoding, temperature: float) -> Typical | None:
    """The same at ``temperature``: at 0 every rule is the greedy one, which is exact."""
    return typical(config) if temperature > 0 else None


def ending(config: Decoding, temperature: float) -> str:
    """What the names of metrics end in that were decoded at ``temperature``."""
    return f"_{LABEL}" if typical_at(config, temperature) else ""


def tags(config: Decoding) -> dict[str, str]:
    """Tags of a run that decodes."""
    hot = [f"{temperature:g}" for temperature in config.temperatures if typical_at(config, temperature)]
    return {LABEL: f"{_words(thresholds(config))} at temperature {', '.join(hot)}"} if hot else {}


def thresholds(config: Decoding) -> dict[str, float]:
    return {"epsilon": config.typical_epsilon, "delta": config.typical_delta}


def measured(
    target: PreTrainedModel, prompt: Sequence[int], texts: dict[str, list[int]], sampling: Sampling, rule: Typical
) -> dict[str, float]:
    """By name of a way of decoding: what ``speculative.typical.excess`` finds on the tokens that it wrote after ``prompt``."""
    return {name: _on_text(target, prompt, tokens, sampling, rule) for name, tokens in texts.items()}


@torch.inference_mode()
def _on_text(target: PreTrainedModel, prompt: Sequence[int], tokens: list[int], sampling: Sampling, rule: Typical) -> float:
    ids = torch.tensor([[*prompt, *tokens]], device=target.device)
    logits = target(input_ids=ids, logits_to_keep=len(tokens) + 1, use_cache=False).logits[0, :-1]
    return float(excess(probabilities(logits, sampling), ids[0, len(prompt) :], rule).mean())


def at_least(rows: Sequence[dict[str, Any]], name: str, seed: int) -> dict[str, float]:
    """The mean over prompts of what ``measured`` found for one way of decoding, and its 95 % interval."""
    values = [row["excess"][name] for row in rows]
    return dict(zip(("mean", "low", "high"), mean_interval(values, seed), strict=True))


def metrics(found: dict[str, Any], end: str) -> dict[str, float]:
    """How far one temperature is from the target, as metrics; ``end`` is their suffix.

    ``lossy/total_variation`` and ``lossy/kl`` (nats): distance of the law of a token that a chain emits where a draft is
    judged from the target's own law p there, exact at each position of held-out text (``speculative.typical.emitted``),
    and averaged; KL is KL(law ‖ p). Of Medusa heads, the first head's. Tokens that follow a round whose drafts all stay
    come from the target and are not in it. No such law is known of trees, where the longest branch wins.
    ``lossy/total_variation_at_least``: a lower bound, from the texts that were written themselves: the share of tokens
    that the rule would keep, less the target's own chance of one, token by token; 0 in expectation for every exact rule.
    ``lossy/tree_total_variation_at_least``: the same of the tree.
    """
    named = {f"{LABEL}/{name}": found[name] for name in ("total_variation", "kl")}
    bounds = {"speculative": "total_variation_at_least", "tree": "tree_total_variation_at_least"}
    named |= {f"{LABEL}/{bounds[way]}": bound["mean"] for way, bound in found["at_least"].items() if way in bounds}
    return {f"{name}{end}": value for name, value in named.items()}


def of(by_temperature: dict[str, Any]) -> dict[str, Any]:
    """By temperature, what is known of its loss; empty where all that was decoded is exact."""
    return {temperature: entry[LABEL] for temperature, entry in by_temperature.items() if LABEL in entry}


def recorded(measured: dict[str, Any]) -> dict[str, Any]:
    """What files beside an export say of the measurement, the details of stage speculate; nothing if it was exact."""
    found = of(measured["by_temperature"])
    return {LABEL: found} if found else {}


def mark(entry: dict[str, Any]) -> str:
    """What follows a temperature wherever a figure of ``entry`` is shown."""
    return f" ({LABEL})" if LABEL in entry else ""


def words(found: dict[str, Any]) -> str:
    """The rule and its distance from the target, in a sentence without an end."""
    exact = ""
    if "kl" in found:
        exact = (
            f"; a token where a draft is judged is {found['total_variation']:.3f} from the target's law in total variation, "
            f"{found['kl']:.3f} nats in KL, over {found['positions']:,} positions of held-out text"
        )
    shown = {way: f"{b['mean']:.3f} [{b['low']:.3f}, {b['high']:.3f}]" for way, b in found["at_least"].items()}
    lost = ", ".join(f"{way} {text}" for way, text in shown.items() if way not in EXACT)
    check = "".join(f" ({way}, which is exact: {text})" for way, text in shown.items() if way in EXACT)
    return (
        f"{_words(found)} does not keep the target's law{exact}; over all tokens of the texts written the total variation is "
        f"at least: {lost}{check}"
    )


def _words(thresholds: dict[str, float]) -> str:
    return f"typical acceptance (ε = {thresholds['epsilon']:g}, δ = {thresholds['delta']:g})"
