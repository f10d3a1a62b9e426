"""The exact law of two tokens of a tiny model, and the chi-square of what the engine writes against it."""

import torch
from scipy import stats

from speculative import generate
from speculative.metrics import total
from speculative.sampling import probabilities

SMALL = 6
PROMPT = [2, 4, 1]


def exact_law(model, sampling):
    """The law of the first two tokens, flattened, from the model's own logits on every prefix."""
    with torch.inference_mode():
        first = probabilities(model(torch.tensor([PROMPT])).logits[0, -1], sampling).double()
        prefixes = torch.tensor([[*PROMPT, token] for token in range(SMALL)])
        second = probabilities(model(prefixes).logits[:, -1], sampling).double()
    return (first[:, None] * second).flatten()


def chi_square(model, draft, sampling, rows=8_000, count=2, new_tokens=3, **options):
    """p-value of the first two tokens of many rows under the exact law, and the acceptance rate."""
    options |= {"draft": draft, "num_draft_tokens": count, "sampling": sampling, "seed": 11}
    done = decode(model, [PROMPT] * rows, max_new_tokens=new_tokens, **options)
    law = exact_law(model, sampling)
    observed = torch.bincount(torch.tensor([a * SMALL + b for a, b, *_ in done.tokens]), minlength=SMALL**2).double()
    assert observed[law == 0].sum() == 0
    common = law * rows >= 5
    seen = torch.cat([observed[common], observed[~common].sum()[None]])
    want = torch.cat([law[common], law[~common].sum()[None]]) * rows
    if want[-1] < 5:
        seen = torch.cat([seen[:-2], seen[-2:].sum()[None]])
        want = torch.cat([want[:-2], want[-2:].sum()[None]])
    assert len(want) >= 4
    return stats.chisquare(seen.numpy(), (want * seen.sum() / want.sum()).numpy()).pvalue, total(done.acceptance).rate


def decode(target, prompts, draft=None, **options):
    """``generate`` with the draft among the options."""
    return generate(target, draft, prompts, **options)
