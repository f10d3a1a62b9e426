"""The decoding loop: propose, verify, commit.

Invariant: the last committed token, the anchor, is not yet in the target's cache. One target forward over the anchor
and K drafted tokens yields K+1 distributions; keeping m of the drafts commits m+1 tokens. Plain decoding is K = 0 of
the same loop. Rows of a batch accept different numbers of tokens and leave when they are done. Ids in, ids out: the
engine knows nothing of text.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculative.cache import CachedModel, check_branching
from speculative.controls import History, along_paths
from speculative.drafters import Drafter, Proposal
from speculative.length import AutoLength
from speculative.medusa import MedusaDrafter
from speculative.metrics import Acceptance, Log, Phases, Ranks, peak_memory
from speculative.rows import Finish, Rows, Stop
from speculative.sampling import Purpose, Sampling, best_token, probabilities, round_keys, uniforms
from speculative.tree import Tree
from speculative.tree_drafter import TreeDrafter
from speculative.tree_verification import Branches, verify_tree, verify_tree_choices
from speculative.typical import Typical, verify_typical
from speculative.verification import Guess, Rule, Verdict, verify_choices, verify_sampled

COMPACT_BELOW = 0.75  # finished rows leave once fewer than this share of the batch is alive: leaving copies the cache


@dataclass(frozen=True)
class Generation:
    """The result, by row: new ``tokens``, why they end, and counts; ``seconds`` are of the whole batch.

    Forwards are those of the batch after prefill. ``peak_memory`` is the most that was held until the end of the call, in
    bytes: by PyTorch on the target's CUDA device, else by the process; None where the system does not tell. ``log_probs``
    are the target's own over its vocabulary, before temperature, filters and controls, if they were asked for. ``text`` is
    there when a tokenizer was given, and ends before the stop string. ``ranks`` counts the branches of a tree, over all
    rows. ``states`` (new tokens, width), by row, are what the target's head read to choose each token, if they were asked
    for. ``lossy``: drafts were judged by a rule that does not keep the target's law.
    """

    tokens: list[list[int]]
    finish: list[Finish]
    acceptance: list[Acceptance]
    seconds: Phases
    draft_forwards: int
    target_forwards: int
    peak_memory: int | None
    log_probs: list[list[float]] | None = None
    text: list[str] | None = None
    ranks: Ranks | None = None
    states: list[Tensor] | None = None
    lossy: bool = False

    @property
    def stopped(self) -> list[bool]:
        """Whether a row ended by itself, and not by its budget."""
        return [finish is not Finish.LENGTH for finish in self.finish]


@dataclass(frozen=True)
class Options:
    """How to decode; see ``speculative.generate`` for each."""

    sampling: Sampling
    rule: Rule
    typical: Typical
    length: int | AutoLength
    longest: int
    tree: Tree | None
    vocabulary_size: int
    eos: Tensor
    seed: int
    stop: Stop | None
    log_probs: bool
    states: bool

    @property
    def lossy(self) -> bool:
        """Whether drafts, if there are any, are judged by a rule that does not keep the target's law."""
        return self.rule is Rule.TYPICAL and not self.sampling.greedy and self.longest > 0


class Decoding:
    """One call's state: ``advance`` runs a round, ``result`` gathers what was written."""

    def __init__(
        self,
        target: PreTrainedModel,
        rows: Rows,
        drafter: Drafter | TreeDrafter | MedusaDrafter | None,
        history: History | None,
        options: Options,
    ) -> None:
        """Prefills both models. ``drafter`` None decodes plainly, ``history`` None without controls."""
        if options.tree is not None:
            check_branching(target)
        self.options, self.rows, self.drafter, self.history = options, rows, drafter, history
        self.seconds = Phases()
        started = time.perf_counter()
        self.model = CachedModel(target, len(rows.index), rows.tokens.shape[1])
        self.model.keeps_states = options.states or isinstance(drafter, MedusaDrafter)
        self.model.prefill(rows.tokens, rows.lengths - 1)
        self.forwards = 0
        auto = isinstance(options.length, AutoLength)
        self.lengths = options.length.for_rows(rows.count) if auto else []  # in the order of the caller
        # A draft whose length is chosen may never be asked; then it need not read the prompts.
        self.drafter_reads = drafter is not None and not auto
        if self.drafter_reads:
            drafter.prefill(rows.tokens, rows.lengths - 1)
        self.log = Log(rows.count, options.longest, options.tree)
        self._lap("prefill", started)

    @property
    def alive(self) -> bool:
        return bool(self.rows.alive.any())

    @property
    def left(self) -> int:
        """The most tokens that a row still wants."""
        return int(((self.rows.ends - self.rows.lengths) * self.rows.alive).max())

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, list[int], Finish | None]]:
        """One round; (row, new ids, why it ended or None) for every row that was alive."""
        mark = time.perf_counter()
        if float(self.rows.alive.float().mean()) < COMPACT_BELOW:
            self._compact()
        rows = self.rows
        wanted = self._wanted()
        count = int(wanted.max())
        mark = self._lap("bookkeeping", mark)
        proposal = Proposal(Guess(rows.tokens[:, :0], None), torch.zeros_like(rows.lengths))
        if self.drafter is not None and count > 0:
            if not self.drafter_reads:
                self.drafter.prefill(rows.tokens, rows.lengths - 1)
                self.drafter_reads, mark = True, self._lap("prefill", mark)
            proposal = self.drafter.propose(rows.tokens, rows.lengths, rows.keys, count)
        mark = self._lap("draft", mark)
        logits, block = self._target_forward(proposal)
        mark = self._lap("target", mark)
        limits = torch.minimum(proposal.counts, wanted)
        verdict = self._verify(logits, proposal.guess, limits)
        mark = self._lap("sample", mark)
        before = rows.lengths
        if isinstance(self.drafter, MedusaDrafter):
            self.drafter.observe(self.model.states[torch.arange(len(before), device=before.device), _last_kept(verdict)])
        if isinstance(proposal.guess, Branches):
            logits, block = self._keep_path(logits, block, verdict, proposal.guess.tree)
        emitted = rows.commit(block, verdict, self.options.eos, self.options.stop)
        if self.options.log_probs:
            rows.note(before, emitted, logits)
        if self.options.states:
            rows.note_states(before, emitted, _along(verdict, self.model.states))
        alive = emitted > 0
        path = None if verdict.path is None else verdict.path[alive]
        self.log.add(rows.index[alive], limits[alive], verdict.accepted[alive], emitted[alive], path)
        if self.lengths:
            self._learn(alive, wanted * (proposal.guess.depth > 0), limits, verdict.accepted)
        if self.drafter is not None:
            self.drafter.rollback(rows.lengths)
        news = rows.news(before, emitted)
        self._lap("bookkeeping", mark)
        return news

    def _wanted(self) -> Tensor:
        """How many drafts each row is to have (B,), 0 if it is done.

        A row must not see drafts that it would not have had alone, or it would depend on its neighbours. So the block is as
        long as one of them wants, and each row keeps to its own length.
        """
        rows, length = self.rows, self.options.length
        left = (rows.ends - rows.lengths - 1) * rows.alive
        if not self.lengths:
            return left.clamp(max=length)
        places = zip(rows.index.tolist(), rows.alive.tolist(), strict=True)
        chosen = [self.lengths[row].choose() if alive else 0 for row, alive in places]
        return torch.minimum(left, torch.tensor(chosen, device=left.device))

    def _learn(self, alive: Tensor, *counts: Tensor) -> None:
        """Drafts asked for, proposed and accepted, each (B,), of the rows that were ``alive`` (B,)."""
        columns = [column[alive].tolist() for column in (self.rows.index, *counts)]
        for row, *found in zip(*columns, strict=True):
            self.lengths[row].observe(*found)
        self.options.length.learn(self.lengths)

    def _lap(self, phase: str, mark: float) -> float:
        if self.model.model.device.type == "cuda":  # else its work would be counted where it is waited for
            torch.cuda.synchronize(self.model.model.device)
        now = time.perf_counter()
        setattr(self.seconds, phase, getattr(self.seconds, phase) + now - mark)
        return now

    def _compact(self) -> None:
        """Finished rows leave the batch."""
        keep = self.rows.alive.nonzero().squeeze(1)
        self.rows.select(keep)
        self.model.cache.select(keep)
        if self.drafter is not None:
            self.drafter.select(keep)
        if self.history is not None:
            self.history = self.history.select(keep)

    def _target_forward(self, proposal: Proposal) -> tuple[Tensor, Tensor]:
        """Logits (B, K+1, V) after the anchor and each drafted token, and that block (B, K+1); K nodes of a tree alike."""
        rows, guess = self.rows, proposal.guess
        self.forwards += 1
        block = torch.cat([rows.tokens.gather(1, rows.lengths[:, None] - 1), guess.tokens], 1)
        if isinstance(guess, Branches):
            logits = self.model.feed_nodes(block, rows.lengths - 1, guess.tree, range(block.shape[1]))
        else:
            positions = rows.lengths[:, None] - 1 + torch.arange(block.shape[1], device=block.device)
            logits = self.model.feed(block, positions, keep=block.shape[1])
        return logits[..., : self.options.vocabulary_size], block  # rows behind are padding of the head

    def _verify(self, logits: Tensor, guess: Guess | Branches, limits: Tensor) -> Verdict:
        rows, options = self.rows, self.options
        branches = isinstance(guess, Branches)
        if self.history is not None:
            text = (rows.tokens, rows.lengths, guess.tokens, guess.paths, rows.alive)
            logits = along_paths(self.history, logits, *text)
        if options.sampling.greedy:
            choices = best_token(logits)
            return verify_tree_choices(choices, guess, limits) if branches else verify_choices(choices, guess.tokens, limits)
        p = probabilities(logits, options.sampling)
        places, drafts = (torch.arange(count, device=p.device) for count in (guess.depth + 1, guess.tokens.shape[1]))
        follow = uniforms(options.seed, rows.keys[:, None], rows.lengths[:, None] + places, Purpose.TARGET)
        if options.rule is Rule.TYPICAL:
            return verify_typical(p, guess, follow, limits, options.typical)
        keys = round_keys(rows.lengths[:, None], drafts)
        accept = uniforms(options.seed, rows.keys[:, None], keys, Purpose.ACCEPT)
        if branches:
            return verify_tree(p, guess, accept, follow, limits)
        return verify_sampled(p, guess, accept, follow, limits, options.rule)

    def _keep_path(self, logits: Tensor, block: Tensor, verdict: Verdict, tree: Tree) -> tuple[Tensor, Tensor]:
        """Both caches keep the branch that stays; logits and block (B, depth+1) along it, arbitrary behind its end."""
        self.model.cache.keep_path(verdict.path, self.rows.lengths - 1)
        self.drafter.keep(verdict.path, self.rows.lengths, tree)
        nodes = torch.nn.functional.pad(verdict.path, (1, 0))
        return _along(verdict, logits) if self.options.log_probs else logits, block.gather(1, nodes)

    @torch.inference_mode()
    def result(self) -> Generation:
        tokens, finish, log_probs = self.rows.texts()
        options, drafter = self.options, self.drafter
        return Generation(
            tokens,
            finish,
            self.log.by_row(),
            self.seconds,
            draft_forwards=0 if drafter is None else drafter.forwards,
            target_forwards=self.forwards,
            peak_memory=peak_memory(self.model.model.device),
            log_probs=log_probs if options.log_probs else None,
            ranks=self.log.ranks(),
            states=self.rows.states() if options.states else None,
            lossy=options.lossy,
        )


def _along(verdict: Verdict, values: Tensor) -> Tensor:
    """Of ``values`` (B, nodes, …) those on the path that stays, (B, depth+1, …); a chain is its own path."""
    if verdict.path is None:
        return values
    nodes = torch.nn.functional.pad(verdict.path, (1, 0))
    return values[torch.arange(len(nodes), device=nodes.device)[:, None], nodes]


def _last_kept(verdict: Verdict) -> Tensor:
    """Place in the block (B,) of the last token that stays, 0 for the anchor: the one that the next token follows."""
    if verdict.path is None:
        return verdict.accepted
    return torch.nn.functional.pad(verdict.path, (1, 0)).gather(1, verdict.accepted[:, None]).squeeze(1)
