"""Drafts distilled from every codec with the same seed and steps, and how much they overlap with the target on other text.

A part of the cache's benchmark. Overlap is Σ min(p, q) against the target's own dense distributions at temperature 1.
"""

import copy

import torch
from rich.progress import track
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from data.batching import LengthGroupedBatches, collate
from data.logit_cache import LogitCache
from data.responses import Response
from data.states import States
from pipeline.config import Draft as DraftConfig
from pipeline.config import Objective, Optimizer
from pipeline.distil import FIT_BATCHES
from pipeline.draft import build, choose_vocabulary
from pipeline.forward import forward
from pipeline.head_fit import fit_head
from pipeline.module import Distillation, freeze_embedding
from pipeline.optimizers import make
from pipeline.outlook import foresee
from pipeline.schedule import share_of_rate
from speculative import Draft
from tests.bench import text

BATCH = 16
LAYERS = [0, 1]


def start(model: PreTrainedModel, cache: LogitCache, vocabulary: int) -> Draft:
    """The draft of the default run: layers of the target, a fitted head, the most frequent tokens of the text.

    No distribution shapes it, so it is the same whatever codec wrote ``cache``.
    """
    rows = (cache[index] for index in range(len(cache)))
    ids = None
    if vocabulary < model.config.vocab_size:
        ids, _ = choose_vocabulary((row.tokens[row.start :].tolist() for row in rows), vocabulary, [])
    draft = build(model, DraftConfig(layers=LAYERS), ids)
    freeze_embedding(draft.model)
    order = LengthGroupedBatches(cache.lengths, BATCH, FIT_BATCHES, seed=0)
    fit_head(draft, model, DataLoader(cache, batch_sampler=order, collate_fn=collate))
    draft.model.train()
    return draft


def taught(model: PreTrainedModel, begun: Draft, cache: LogitCache, steps: int) -> Draft:
    """A copy of ``begun`` that learnt ``steps`` batches of ``cache`` by forward KL."""
    optimizer, draft = Optimizer(), copy.deepcopy(begun)
    costs = foresee(draft, model, model.dtype).costs
    learner = Distillation(draft, model.config.vocab_size, Objective(), optimizer, steps, {}, costs)
    learner.log = lambda *given, **options: None
    stepper = make(draft.model, optimizer, torch.float32)
    schedule = torch.optim.lr_scheduler.LambdaLR(stepper, lambda step: share_of_rate(step, steps, optimizer))
    batches = DataLoader(cache, batch_sampler=LengthGroupedBatches(cache.lengths, BATCH, steps, seed=1), collate_fn=collate)
    for number, batch in enumerate(track(batches, description="distil", transient=True)):
        stepper.zero_grad()
        learner.training_step(batch, number).backward()
        torch.nn.utils.clip_grad_norm_(draft.model.parameters(), optimizer.gradient_clip)
        stepper.step()
        schedule.step()
    return draft


@torch.inference_mode()
def overlap(model: PreTrainedModel, draft: Draft, others: list[Response], states: States) -> float:
    """Mean Σ min(p, q) of the draft and the target over the tokens of ``others``."""
    total = count = 0.0
    for row in others:
        p = text.log_probs(model, row, states).exp()
        q = forward(draft.model.eval(), [row], False)[0].float().softmax(-1)
        p = p if draft.vocabulary is None else p[:, draft.vocabulary]
        total += float(torch.minimum(p, q).sum())
        count += len(q)
    return total / count
