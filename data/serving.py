"""Which losses a codec can serve, by the names of the configuration.

A loss that follows q reaches ids that a sparse codec did not keep: what is missing has no bound, and neither have the
weights q / p of drawn ids. The others follow p, and miss at most about the mass that was not kept. Drawn ids stand for
that mass without bias in a sum over ids; a loss that also weighs such a sum by the overlap needs ids that were kept for
certain. A loss that cannot be served is refused before training, with a codec that can.
"""

FOLLOWS_Q = frozenset({"reverse_kl"})
WEIGHED = frozenset({"overlap", "hybrid"})  # by a function of the overlap


def refusal(codec: str, objective: str) -> str | None:
    """Why ``codec`` cannot serve ``objective`` (names of the configuration), with one that can; None if it can."""
    if codec not in ("hidden", "dense") and objective in FOLLOWS_Q:
        return f"needs the target's probability of ids that codec={codec} does not keep; use codec=hidden (or codec=dense)"
    if codec == "sampled" and objective in WEIGHED:
        return "needs ids that were kept for certain, and codec=sampled draws all of them; use codec=topk (or codec=hidden)"
    return None
