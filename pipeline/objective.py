"""The objective that the configuration names: one divergence, and a share of hard cross-entropy mixed in.

It chooses and mixes; the formulas are in ``losses``, and positions are averaged by the caller.
"""

from torch import Tensor

from pipeline import losses
from pipeline.choices import Divergence
from pipeline.config import Objective
from pipeline.losses import Support


def values(config: Objective, log_q: Tensor, target: Support, written: Tensor) -> Tensor:
    """(1 − hard_weight) · divergence + hard_weight · cross-entropy by position, (N,).

    Args:
        log_q: (N, D) log-probabilities of the draft.
        target: distributions at these positions.
        written: (N,) draft ids of the tokens that the target wrote there, −1 where the draft lacks them. They are drawn
            at the temperature of decoding: from p itself at 1, the best token at 0.
    """
    chosen = _chosen(config, log_q, target, written)
    if config.hard_weight == 0:
        return chosen
    return (1 - config.hard_weight) * chosen + config.hard_weight * losses.cross_entropy(log_q, written)


def _chosen(config: Objective, log_q: Tensor, target: Support, written: Tensor) -> Tensor:
    match config.divergence:
        case Divergence.forward_kl:
            return losses.forward_kl(log_q, target)
        case Divergence.reverse_kl:
            return losses.reverse_kl(log_q, target)
        case Divergence.jensen_shannon:
            return losses.jensen_shannon(log_q, target, config.beta)
        case Divergence.total_variation:
            return losses.total_variation(log_q, target)
        case Divergence.overlap:
            return losses.negative_log_overlap(log_q, target)
        case Divergence.hybrid:
            return losses.hybrid(log_q, target, config.eta)
        case Divergence.cross_entropy:
            return losses.cross_entropy(log_q, written)
