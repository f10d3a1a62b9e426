"""A draft for benchmarks where no distilled one is given: two layers of the target and a head fitted on text that it writes."""

import torch
from transformers import PreTrainedModel

import speculative
from data.batching import Batch
from data.targets import SparseTargets
from pipeline import draft as drafts
from pipeline.config import Draft as DraftConfig
from pipeline.head_fit import fit_head
from speculative import Draft

NOTHING = SparseTargets(torch.empty(0, 1), torch.empty(0, 1), torch.empty(0))


def fitted(target: PreTrainedModel, prompts: list[list[int]]) -> Draft:
    """The draft, over the target's whole vocabulary, in float32."""
    draft = drafts.build(target, DraftConfig(), None)
    written = speculative.generate(target, None, prompts, max_new_tokens=48).tokens
    rows = [torch.tensor(prompt + text) for prompt, text in zip(prompts, written, strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    predicts = torch.zeros_like(tokens, dtype=torch.bool)
    for place, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        predicts[place, len(prompt) - 1 : len(row) - 1] = True
    fit_head(draft, target, [Batch(tokens, predicts, NOTHING)])
    return draft
