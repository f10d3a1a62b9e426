"""Models of six and of forty-eight tokens, and drafts of every quality for them."""

import pytest
import torch

from speculative import Draft
from tests.speculative.laws import SMALL
from tests.speculative.tiny import DOUBLE, KEPT, perturbed, tiny, trimmed


@pytest.fixture(scope="session")
def small():
    shape = {"vocabulary": SMALL, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny(**shape)
    kept = torch.tensor([0, 1, 3, 4])
    drafts = {
        "plain": None,
        "other": Draft(tiny(seed=1, **shape)),
        "near": Draft(perturbed(model, 0.1)),
        "same": Draft(model),
        "trimmed": Draft(trimmed(kept, seed=1, **shape), kept),
    }
    return model, drafts


@pytest.fixture(scope="module")
def target():
    return tiny(dtype=DOUBLE)


@pytest.fixture(scope="module")
def drafts(target):
    """From never right to always right, by name."""
    vocabulary = torch.tensor(KEPT)
    return {
        "other": Draft(tiny(seed=1, dtype=DOUBLE)),
        "near": Draft(perturbed(target)),
        "same": Draft(target),
        "trimmed": Draft(trimmed(vocabulary, dtype=DOUBLE), vocabulary),
        "gpt2": Draft(tiny("gpt2", seed=2, dtype=DOUBLE)),
    }
