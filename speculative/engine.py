"""The decoding loop: propose, verify, commit.

Invariant: the last committed token, the anchor, is not yet in the target's cache. One target forward over the anchor
and K drafted tokens yields K+1 distributions; keeping m of the drafts commits m+1 tokens. Plain decoding is K = 0 of
the same loop. Rows of a batch accept different numbers of tokens and leave when they are done. Ids in, ids out: the
engine knows nothing of text.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculative.cache import CachedModel
from speculative.drafters import Draft, ModelDrafter, Proposal
from speculative.metrics import Acceptance, Log
from speculative.sampling import Purpose, Sampling, draw, probabilities, uniforms
from speculative.verification import Verdict, verify_greedy, verify_sampled

COMPACT_BELOW = 0.75  # finished rows leave once fewer than this share of the batch is alive: leaving copies the cache


@dataclass
class Phases:
    """Wall seconds by phase; their sum is the whole call."""

    prefill: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    other: float = 0.0

    @property
    def decoding(self) -> float:
        return self.draft + self.target + self.other


@dataclass(frozen=True)
class Generation:
    """``tokens``: new ids by row; ``stopped``: whether a row ended at an EOS id; counts by row; seconds of the call."""

    tokens: list[list[int]]
    stopped: list[bool]
    acceptance: list[Acceptance]
    seconds: Phases


@dataclass
class _Rows:
    """Mutable state of the live rows; everything (B, ...) is indexed by place in the batch, ``index`` leads back."""

    tokens: Tensor  # (B, capacity) committed ids
    lengths: Tensor  # (B,) committed count
    ends: Tensor  # (B,) length at which the budget is spent
    keys: Tensor  # (B,) names of the rows for the random numbers
    index: Tensor  # (B,) place in the caller's list
    alive: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.alive = self.lengths < self.ends

    def select(self, rows: Tensor) -> None:
        for name in ("tokens", "lengths", "ends", "keys", "index", "alive"):
            setattr(self, name, getattr(self, name)[rows])


@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    draft: Draft | None = None,
    num_draft_tokens: int = 0,
    sampling: Sampling | None = None,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    row_keys: Sequence[int] | None = None,
) -> Generation:
    """Continue every prompt by up to ``max_new_tokens`` tokens whose law is the target's under ``sampling``.

    Args:
        target: a decoder-only model in eval mode.
        prompts: token ids by row; rows may have different lengths.
        max_new_tokens: one budget, or one for each row.
        draft: the proposer; None decodes plainly.
        num_draft_tokens: K, the tokens drafted each round.
        sampling: defaults to greedy decoding.
        eos_token_ids: ids that end a row; the id itself is kept. Empty: rows run to their budget.
        seed, row_keys: the random numbers of a row depend on these two alone; keys default to the row's place.

    Raises:
        ValueError: an empty prompt, a negative K, more positions than a model's context has.
    """
    sampling = sampling or Sampling(temperature=0.0)
    depth = num_draft_tokens if draft is not None else 0
    budgets = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    capacity = _capacity(target, draft, prompts, budgets, num_draft_tokens, row_keys)
    started = time.perf_counter()
    seconds = Phases()
    rows = _start(prompts, budgets, capacity, row_keys, target.device)
    final, stopped = rows.lengths.clone(), torch.zeros(len(prompts), dtype=torch.bool, device=target.device)
    committed, eos = rows.tokens.clone(), torch.tensor(list(eos_token_ids), device=target.device)
    rows.select(rows.alive.nonzero().squeeze(1))
    model = CachedModel(target, len(rows.index), capacity)
    model.prefill(rows.tokens, rows.lengths - 1)
    drafter = None
    if draft is not None and depth > 0:
        drafter = ModelDrafter(draft, len(rows.index), capacity, sampling, seed)
        drafter.prefill(rows.tokens, rows.lengths - 1)
    seconds.prefill = time.perf_counter() - started

    log = Log(len(prompts), depth)
    while bool(rows.alive.any()):
        mark = time.perf_counter()
        if float(rows.alive.float().mean()) < COMPACT_BELOW:
            keep = rows.alive.nonzero().squeeze(1)
            committed[rows.index] = rows.tokens
            for part in (rows, model.cache, drafter):
                if part is not None:
                    part.select(keep)
        now = time.perf_counter()
        seconds.other, mark = seconds.other + now - mark, now
        remaining = int((rows.ends - rows.lengths)[rows.alive].max())
        count = min(depth, remaining - 1)
        proposal = drafter.propose(rows.tokens, rows.lengths, rows.keys, count) if drafter and count > 0 else None
        now = time.perf_counter()
        seconds.draft, mark = seconds.draft + now - mark, now

        logits, block = _target_forward(model, rows, proposal)
        now = time.perf_counter()
        seconds.target, mark = seconds.target + now - mark, now

        # A row near its budget must not see drafts that it would not have had alone, or it would depend on others.
        limits = (rows.ends - rows.lengths - 1).clamp(0, count)
        verdict = _verify(logits, proposal, rows, limits, sampling, seed, draft.vocabulary if draft else None)
        emitted, ended = _commit(rows, block, verdict, eos)
        log.add(rows.index[rows.alive], limits[rows.alive], verdict.accepted[rows.alive], emitted[rows.alive])
        stopped[rows.index] |= ended
        final[rows.index] = rows.lengths
        if drafter:
            drafter.rollback(rows.lengths)
        rows.alive = rows.alive & ~ended & (rows.lengths < rows.ends)
        seconds.other += time.perf_counter() - mark

    committed[rows.index] = rows.tokens
    tokens = [committed[i, len(prompt) : end].tolist() for i, (prompt, end) in enumerate(zip(prompts, final, strict=True))]
    return Generation(tokens, stopped.tolist(), log.by_row(), seconds)


def _capacity(
    target: PreTrainedModel,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    num_draft_tokens: int,
    row_keys: Sequence[int] | None,
) -> int:
    """Slots that the longest row can need, after refusing what cannot be decoded."""
    if not prompts or min(map(len, prompts)) == 0:
        raise ValueError("every prompt needs at least one token")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must be ≥ 0, not {num_draft_tokens}")
    if len(budgets) != len(prompts) or min(budgets) < 0:
        raise ValueError("max_new_tokens must be one number ≥ 0, or one for each prompt")
    if row_keys is not None and len(row_keys) != len(prompts):
        raise ValueError(f"row_keys needs one key for each of the {len(prompts)} prompts, not {len(row_keys)}")
    if draft is not None:
        draft.check_fits(target.config.vocab_size)
    longest = max(len(prompt) + budget for prompt, budget in zip(prompts, budgets, strict=True))
    for name, model in (("target", target), ("draft", draft and draft.model)):
        context = model and getattr(model.config, "max_position_embeddings", None)
        if context and longest > context:
            raise ValueError(f"prompt and new tokens need {longest} positions, the {name}'s context has {context}")
        if model is not None and model.training:
            raise ValueError(f"the {name} is in training mode; call .eval() first")
    return longest + num_draft_tokens + 1


def _start(
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    capacity: int,
    row_keys: Sequence[int] | None,
    device: torch.device,
) -> _Rows:
    tokens = torch.zeros(len(prompts), capacity, dtype=torch.long)
    for place, prompt in enumerate(prompts):
        tokens[place, : len(prompt)] = torch.as_tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    index = torch.arange(len(prompts))
    keys = index if row_keys is None else torch.tensor(list(row_keys))
    return _Rows(*(t.to(device) for t in (tokens, lengths, lengths + torch.tensor(budgets), keys, index)))


def _target_forward(model: CachedModel, rows: _Rows, proposal: Proposal | None) -> tuple[Tensor, Tensor]:
    """Logits (B, K+1, V) after the anchor and each drafted token, and that block (B, K+1)."""
    block = rows.tokens.gather(1, rows.lengths[:, None] - 1)
    if proposal is not None:
        block = torch.cat([block, proposal.tokens], 1)
    positions = rows.lengths[:, None] - 1 + torch.arange(block.shape[1], device=block.device)
    return model.feed(block, positions, keep=block.shape[1]), block


def _verify(
    logits: Tensor,
    proposal: Proposal | None,
    rows: _Rows,
    limits: Tensor,
    sampling: Sampling,
    seed: int,
    vocabulary: Tensor | None,
) -> Verdict:
    if sampling.greedy:
        choices = logits.argmax(-1)
        drafted = choices[:, :0] if proposal is None else proposal.tokens
        return verify_greedy(choices, drafted, limits)
    p = probabilities(logits, sampling)
    positions = rows.lengths[:, None] + torch.arange(logits.shape[1], device=logits.device)
    follow = uniforms(seed, rows.keys[:, None], positions, Purpose.TARGET)
    if proposal is None:
        return Verdict(torch.zeros_like(rows.lengths), draw(p[:, 0], follow[:, 0]))
    accept = uniforms(seed, rows.keys[:, None], positions[:, :-1], Purpose.ACCEPT)
    return verify_sampled(p, proposal.probabilities, proposal.tokens, accept, follow, vocabulary, limits)


def _commit(rows: _Rows, block: Tensor, verdict: Verdict, eos: Tensor) -> tuple[Tensor, Tensor]:
    """Append accepted drafts and the token after them, cut at the first EOS and at the budget.

    Returns tokens emitted by row (B,), zero for finished rows, and whether an EOS ended the row (B,).
    """
    width = block.shape[1]
    place = torch.arange(width, device=block.device)
    new = torch.cat([block[:, 1:], block[:, :1]], 1)  # the last column is overwritten when every draft was accepted
    new.scatter_(1, verdict.accepted[:, None], verdict.following[:, None])
    rows.tokens.scatter_(1, rows.lengths[:, None] + place, new)
    emitted = torch.minimum(verdict.accepted + 1, rows.ends - rows.lengths)
    is_eos = torch.isin(new, eos) & (place < emitted[:, None])
    ended = is_eos.any(-1) & rows.alive
    emitted = torch.where(ended, is_eos.long().argmax(-1) + 1, emitted) * rows.alive
    rows.lengths = rows.lengths + emitted
    return emitted, ended
