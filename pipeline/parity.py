"""Parity: what a stranger computes from the exported files is what was trained and measured here.

The files are read by plain transformers in a process of its own. Four things must hold for every form: kept logits
equal the trained draft's, overlap with the target equals the trained draft's, as many of its tokens are accepted as of the
trained draft's in the same rounds, and the target's greedy output stays as it was with this draft as assistant. A GGUF
file's logits and accepted tokens are compared with the draft rounded in the same way, so that a mix-up of rows does not
hide behind rounding, and one token of a few dozen that rounding turned does not pass for one.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.responses import Response
from pipeline import stock_reader
from pipeline.errors import PipelineError
from speculative import Draft

LOGITS = 1e-4  # largest difference of float32 logits
OVERLAP = 0.01  # largest difference of mean overlaps
ACCEPTANCE = 0.01  # largest difference of accepted ÷ proposed
TEXTS, POSITIONS = 8, 32  # held-out texts, and positions of each, that are compared
PROMPTS, NEW_TOKENS = 3, 32  # greedy answers that are compared


@dataclass(frozen=True)
class Likeness:
    """What one form of the export differs by; ``same_output``: greedy answers with and without it are equal.

    ``acceptance`` is accepted ÷ proposed in transformers' assisted generation of these answers, ``acceptance_trained`` the
    same of the trained draft as this form stores it.
    """

    largest_logit_difference: float
    excluded_mass: float
    overlap: float
    overlap_trained: float
    acceptance: float
    acceptance_trained: float
    same_output: bool


def job(
    target: Path, draft: Path, forms: dict[str, dict[str, str]], held_out: Sequence[Response], length: int
) -> dict[str, Any]:
    """What the other process is to do; K = ``length`` drafts a round."""
    texts = [response for response in held_out if response.tokens][:TEXTS]
    if not texts:
        raise PipelineError("corpus.test: no test prompt has an answer to compare the export on; raise corpus.test")
    prompts = list(dict.fromkeys(response.request.prompt for response in texts))[:PROMPTS]
    return {
        "target": str(target),
        "draft": str(draft),
        "forms": forms,
        "texts": [
            {
                "ids": [*text.request.prompt, *text.tokens],
                "first": len(text.request.prompt),
                "count": min(len(text.tokens), POSITIONS),
            }
            for text in texts
        ],
        "prompts": [list(prompt) for prompt in prompts],
        "new_tokens": NEW_TOKENS,
        "draft_tokens": length,
    }


def in_a_fresh_process(order: dict[str, Any]) -> dict[str, Any]:
    """The answers of ``stock_reader``, run as a script where Draftsmith's modules are not on the path.

    Raises:
        PipelineError: it could not load the files; its own words are given.
    """
    with tempfile.TemporaryDirectory() as folder:
        place, answers = Path(folder) / "job.json", Path(folder) / "answers.pt"
        place.write_text(json.dumps({**order, "answers": str(answers)}), encoding="utf-8")
        # -P keeps the script's own folder, which holds Draftsmith's modules, off the path.
        command = [sys.executable, "-P", stock_reader.__file__, str(place)]
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise PipelineError(f"export: plain transformers cannot use the exported files ({last})")
        return torch.load(answers, weights_only=True)


@torch.inference_mode()
def compare(answers: dict[str, Any], form: str, trained: Draft, rounded: Draft, order: dict[str, Any]) -> Likeness:
    """Measure one form: its logits and accepted tokens against ``rounded``, the trained draft as this form stores it; its
    overlap against ``trained``. Both in float32; ``order`` is the ``job`` that was answered."""
    texts = order["texts"]
    written = list(zip(order["prompts"], answers["forms"][form]["assisted"], answers["forms"][form]["proposals"], strict=True))
    exported, p = answers["forms"][form]["logits"], answers["target"].softmax(-1)
    kept = exported if trained.vocabulary is None else exported[:, trained.vocabulary]
    known = p if trained.vocabulary is None else p[:, trained.vocabulary]
    inside = (kept.logsumexp(-1) - exported.logsumexp(-1)).exp()
    return Likeness(
        largest_logit_difference=float((kept - stock_reader.logits(rounded.model, texts)).abs().max()),
        excluded_mass=float((1 - inside).max().clamp(min=0)),
        overlap=_mean_overlap(p, exported),
        overlap_trained=_mean_overlap(known, stock_reader.logits(trained.model, texts)),
        acceptance=acceptance(written),
        acceptance_trained=acceptance([(prompt, ids, redrafted(rounded, prompt, ids, made)) for prompt, ids, made in written]),
        same_output=answers["forms"][form]["assisted"] == answers["plain"],
    )


Written = tuple[list[int], list[int], list[list[int]]]  # a prompt, its answer, the ids proposed in each round


def acceptance(written: Sequence[Written]) -> float:
    """Accepted ÷ proposed over all rounds; a proposal is accepted as far as the answer goes on with it (0 of 0 is 0)."""
    accepted = sum(sum(_agreed(answer, proposals)) for _, answer, proposals in written)
    return accepted / max(sum(len(made) for _, _, proposals in written for made in proposals), 1)


def _agreed(answer: Sequence[int], proposals: Sequence[Sequence[int]]) -> list[int]:
    """By round, how many of its proposals the answer goes on with; a round begins behind the token that ended the last."""
    counts, place = [], 0
    for made in proposals:
        equal = [one == other for one, other in zip(made, answer[place:], strict=False)]
        counts.append([*equal, False].index(False))
        place += counts[-1] + 1
    return counts


def redrafted(draft: Draft, prompt: list[int], answer: list[int], proposals: list[list[int]]) -> list[list[int]]:
    """What ``draft`` proposes greedily where another proposed ``proposals``: after the same text, as many ids."""
    drafted, place = [], 0
    for made, agreed in zip(proposals, _agreed(answer, proposals), strict=True):
        text = [*prompt, *answer[:place]]
        ids: list[int] = []
        for _ in made:
            best = int(draft.model(input_ids=torch.tensor([[*text, *ids]]), use_cache=False).logits[0, -1].argmax())
            ids.append(best if draft.vocabulary is None else int(draft.vocabulary[best]))
        drafted.append(ids)
        place += agreed + 1
    return drafted


def _mean_overlap(p: Tensor, logits: Tensor) -> float:
    return float(torch.minimum(p, logits.softmax(-1)).sum(-1).double().mean())


def require(likeness: Likeness, form: str, misplaced: list[str]) -> None:
    """Refuse an export that is not what was trained.

    Raises:
        PipelineError: naming the form, what differs and by how much.
    """
    where = f"export: the exported files ({form}), read by plain transformers,"
    if misplaced:
        raise PipelineError(f"{where} lack weights or hold strange ones: {', '.join(misplaced[:3])}")
    if not likeness.largest_logit_difference <= LOGITS:
        raise PipelineError(
            f"{where} give logits that differ from the trained draft's by {likeness.largest_logit_difference:.2e} (> {LOGITS})"
        )
    difference = abs(likeness.overlap - likeness.overlap_trained)
    if not difference <= OVERLAP:
        raise PipelineError(
            f"{where} have overlap {likeness.overlap:.3f} where the trained draft has {likeness.overlap_trained:.3f} "
            f"(differs by more than {OVERLAP}); with a trimmed vocabulary raise draft.vocabulary_size (0 keeps all), with a "
            "GGUF file choose a finer export.gguf_type"
        )
    difference = abs(likeness.acceptance - likeness.acceptance_trained)
    if not difference <= ACCEPTANCE:
        raise PipelineError(
            f"{where} have {likeness.acceptance:.3f} of their tokens accepted where the trained draft has "
            f"{likeness.acceptance_trained:.3f} in the same rounds (differs by more than {ACCEPTANCE})"
        )
    if not likeness.same_output:
        raise PipelineError(f"{where} change the target's greedy output when they assist it")
