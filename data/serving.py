"""Which losses a codec can serve, by the names of the configuration.

A loss that follows q reaches ids that a sparse codec did not keep: what is missing has no bound, and neither have the
weights q / p of drawn ids. The others follow p, and miss at most about the mass that was not kept. Drawn ids stand for
that mass without bias in a sum over ids, but not in a function of such sums. A loss that cannot be served is refused before
training, with a codec that can.
"""

FOLLOWS_Q = frozenset({"reverse_kl"})
NO_SUM = frozenset({"overlap", "hybrid"})  # the logarithm of a sum, a product of two


def refusal(codec: str, objective: str, drawn: bool) -> str | None:
    """Why ``codec`` cannot serve ``objective`` (names of the configuration), with one that can; None if it can.

    ``drawn``: some of the ids that the codec keeps were drawn.
    """
    if codec not in ("hidden", "dense") and objective in FOLLOWS_Q:
        return f"needs the target's probability of ids that codec={codec} does not keep; use codec=hidden (or codec=dense)"
    if drawn and objective in NO_SUM:
        return "is no sum over ids, so drawn ids would bias it; use codec=topk with codec.tail_samples=0, or codec=hidden"
    return None
