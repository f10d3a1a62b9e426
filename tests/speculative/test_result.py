"""What the result says of the work: forwards, peak memory; and what decoding must leave alone or do but once."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, NoRepeatNGramLogitsProcessor

from speculative import Controls, Draft, Sampling, drafters, engine, generate, stream
from speculative.metrics import peak_memory
from speculative.rows import Rows
from speculative.verification import verify_sampled
from tests.speculative.oracles import PROMPTS, WARM
from tests.speculative.tiny import perturbed, tiny


def test_forwards_are_those_of_the_batch(target, drafts):
    done = generate(target, drafts["same"], PROMPTS, max_new_tokens=12, num_draft_tokens=3)
    assert (done.target_forwards, done.draft_forwards) == (3, 9)
    plain = generate(target, None, PROMPTS, max_new_tokens=[4, 1, 7, 2, 2, 2])
    assert (plain.target_forwards, plain.draft_forwards) == (7, 0)
    assert max(part.target_forwards for part in plain.acceptance) == 7


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="the oracle is Linux's own account")
def test_peak_memory_is_what_the_process_held_at_most(target):
    def high_water():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    done = generate(target, None, PROMPTS, max_new_tokens=3)
    assert done.peak_memory == pytest.approx(high_water(), rel=0.02)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    room = max(0, done.peak_memory - resident) + (64 << 20)
    held = torch.ones(room // 4)
    assert peak_memory(held.device) >= done.peak_memory + (32 << 20)


def test_the_draw_the_ratio_and_the_residual_use_one_distribution(target, drafts, monkeypatch):
    """q as verified is bit for bit what was drawn from; p is made once for each round."""
    drawn, made, rounds = [], [], []
    draw, probabilities = drafters.draw, engine.probabilities
    monkeypatch.setattr(drafters, "draw", lambda q, u: drawn.append(q.clone()) or draw(q, u))
    monkeypatch.setattr(engine, "probabilities", lambda logits, s: made.append(probabilities(logits, s)) or made[-1])

    def verify(p, guess, *rest):
        rounds.append(len(drawn))
        if guess.q is not None:
            assert torch.equal(guess.q, torch.stack(drawn, 1))
        drawn.clear()
        assert p is made[-1]
        return verify_sampled(p, guess, *rest)

    monkeypatch.setattr(engine, "verify_sampled", verify)
    done = generate(target, drafts["near"], PROMPTS[:1], max_new_tokens=15, num_draft_tokens=3, sampling=WARM)
    assert len(made) == len(rounds) == done.target_forwards
    assert max(rounds) == 3


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
def test_a_correction_is_committed_in_the_round_of_its_rejection(target, drafts, monkeypatch, sampling):
    """The transcript replayed: drafts that stay and the token after them, round by round, are the text."""
    said, real = [], Rows.commit

    def commit(rows, block, verdict, eos, stop):
        said.extend([*block[0, 1 : 1 + int(verdict.accepted[0])].tolist(), int(verdict.following[0])])
        return real(rows, block, verdict, eos, stop)

    monkeypatch.setattr(Rows, "commit", commit)
    done = generate(target, drafts["near"], PROMPTS[:1], max_new_tokens=20, num_draft_tokens=3, sampling=sampling)
    assert 0 < done.acceptance[0].accepted < done.acceptance[0].proposed
    assert said == done.tokens[0]


def test_nothing_is_copied_deeply_while_decoding(target, drafts, monkeypatch):
    pieces = stream(target, drafts["near"], PROMPTS, max_new_tokens=12, sampling=WARM)
    next(pieces)

    def refuse(*_):
        raise AssertionError("a deep copy in the loop")

    monkeypatch.setattr(copy, "deepcopy", refuse)
    assert sum(len(piece.tokens) for piece in pieces) > 0


def test_a_configuration_and_its_processors_are_left_as_they_were(target, drafts):
    config = GenerationConfig(max_new_tokens=6, do_sample=True, top_p=0.9, eos_token_id=[3], repetition_penalty=1.2)
    processor = NoRepeatNGramLogitsProcessor(2)
    before = copy.deepcopy((config.to_dict(), vars(processor)))
    generate(target, drafts["near"], PROMPTS, generation_config=config, controls=Controls(processors=[processor]))
    assert (config.to_dict(), vars(processor)) == before


@pytest.mark.parametrize("name", ["near", "other"])
def test_low_precision_writes_what_is_best_or_nearly(name):
    """Blocks and single steps round differently; each token must be within rounding of the best after the text before it."""
    target = tiny(dtype=torch.bfloat16)
    draft = Draft(perturbed(target) if name == "near" else tiny(seed=1, dtype=torch.bfloat16))
    for drafts in (None, draft):
        done = generate(target, drafts, PROMPTS, max_new_tokens=24, num_draft_tokens=4)
        for prompt, tokens in zip(PROMPTS, done.tokens, strict=True):
            assert shortfall(target, prompt, tokens) <= 2**-4
    wrong = [(token + 1) % 48 for token in tokens]
    assert shortfall(target, prompt, wrong) > 2**-4  # the check can fail


def shortfall(target, prompt, tokens):
    """How far the tokens' logits lie below the best, at most; in units of the largest logit."""
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    return float((logits.amax(-1) - chosen).max() / logits.abs().max())
