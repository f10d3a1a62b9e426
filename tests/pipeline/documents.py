"""Documents of drafts that never were, with numbers that hang together as real ones do."""

import numpy as np

from pipeline.page import Row
from speculative.cost import expected_tokens


def document(overlap: float, layers: int = 2, drafts: int = 2, seed: int = 0) -> dict:
    """A draft whose measured ratio is what its costs predict, but for a few per cent."""
    random = np.random.default_rng(seed)
    return {
        "target": "tiny",
        "precision": "float32",
        "machine": {"cpu": "a processor", "cores": 2, "threads": 1, "torch": "2"},
        "draft": {"layers": layers, "width": 576, "vocabulary": 8192, "parameters": 6e6 * layers, "read_per_step": 5e6 * layers,
                  "vocabulary_coverage": 0.98},
        "training": {"train_positions": 100_000, "epochs": 2.0, "best_step": 500},
        "curves": {
            "train/loss": [(step, 2.0 - overlap + 3 / (1 + step / 40)) for step in range(0, 600, 20)],
            "validation-1/overlap": [(step, overlap * (1 - np.exp(-step / 150))) for step in range(100, 601, 100)],
        },
        "lossless": {"prompts": 48, "different": 0, "oracle_answers": 0, "oracle_different": 0},
        "by_temperature": {t: _entry(overlap * share, layers, drafts, random) for t, share in (("0", 1.1), ("1", 1.0))},
    }  # fmt: skip


def _entry(overlap: float, layers: int, drafts: int, random: np.random.Generator) -> dict:
    costs = {"plain_seconds": 0.02, "draft": 0.06 * layers, "verify": [0.95, 1.0, 1.06, 1.1], "other": [0.05, 0.06, 0.07, 0.08]}
    cost = drafts * costs["draft"] + costs["verify"][drafts] + costs["other"][drafts]
    tokens = expected_tokens(overlap, drafts)
    measured = tokens / cost * (1 + 0.04 * random.normal())
    alignment = {
        "overlap": overlap, "acceptance": overlap, "top1": overlap * (1 + 0.05 * random.normal()),
        "total_variation": 1 - overlap,
        "forward_kl": 3 * (1 - overlap) + 0.1 * random.normal(), "reverse_kl": 4 * (1 - overlap) + 0.3 * random.normal(),
        "jensen_shannon": 0.6 * (1 - overlap), "vocabulary_mass": 0.99,
    }  # fmt: skip
    return {
        "before": {**alignment, "overlap": 0.1},
        "alignment": alignment,
        "draft_tokens": drafts,
        "predicted": tokens / cost,
        "tokens_per_round_predicted": tokens,
        "tokens_per_round": tokens + 0.03,
        "acceptance_rate": overlap,
        "by_position": [overlap * 0.97, overlap * 1.03][:drafts],
        "ratio": {"median": measured, "low": measured - 0.08, "high": measured + 0.06},
        "costs": costs,
        "break_even_overlap": 0.2,
        "waterfall": {
            "text": tokens / cost,
            "prefixes": tokens / cost * 0.97,
            "positions": tokens / cost * 1.01,
            "product": tokens / cost,
            "time": measured,
        },
        "prompts": [
            {
                "kind": kind,
                "predicted": tokens / cost,
                "measured": measured * (1 + 0.1 * random.normal()),
                "tokens_per_round": tokens,
            }
            for kind in ("explain", "test", "write")
            for _ in range(2)
        ],
    }


def rows(measured: int, failed: int = 0, name: str = "trainer.max_steps={number}") -> list[Row]:
    """Drafts of three shapes, the better trained the later; then those that failed."""
    good = [
        Row(n, name.format(number=n), "FINISHED", "", document(0.25 + 0.4 * n / (measured + 1), 1 + n % 3, 1 + n % 2, seed=n))
        for n in range(1, measured + 1)
    ]
    error = "optimizer.learning_rate=1e+30: the loss is nan at step 3; the last good checkpoint is kept.\nLower it"
    ends = [("FAILED", error), ("KILLED", "")]
    bad = [Row(n, name.format(number=n), *ends[n % 2], None) for n in range(measured + 1, measured + failed + 1)]
    return good + bad
