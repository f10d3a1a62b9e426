"""Which losses a codec can serve, by the names of the configuration.

A loss that follows q reaches ids that a sparse codec did not keep: there it is biased, or its weights q / p have no bound.
Forward KL and min(p, q) follow p. It is refused before training, with a codec that can.
"""

FOLLOWS_Q = frozenset({"reverse_kl", "jensen_shannon"})
WEIGHTED: frozenset[str] = frozenset()  # objectives whose code sums with ``Support.weights``


def refusal(codec: str, objective: str) -> str | None:
    """Why ``codec`` cannot serve ``objective`` (names of the configuration), with one that can; None if it can."""
    if codec in ("hidden", "dense") or objective not in FOLLOWS_Q:
        return None
    return f"needs the target's probability of ids that codec={codec} does not keep; use codec=hidden (or codec=dense)"


def weights_refusal(objective: str) -> str | None:
    """Why targets with drawn ids cannot serve ``objective`` yet, with a codec that can; None if they can."""
    if objective in WEIGHTED:
        return None
    return f"objective.divergence={objective} does not sum with weights yet; set codec.tail_samples=0, or use codec=hidden"
