"""Medusa heads in training: the target k tokens further on is what head k is held to, and what validation promises is exact."""

from itertools import product
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

import speculative
from data.hidden_rows import HiddenRow, collate
from data.responses import Request, Response
from pipeline import heads as medusa_heads
from pipeline import heads_export, proposer
from pipeline.check import check
from pipeline.config import Objective, Optimizer
from pipeline.errors import PipelineError
from pipeline.head_module import DECAY, HeadDistillation
from pipeline.losses import top1
from pipeline.objective import values
from pipeline.validation import HeadTally, Tally
from speculative import Sampling, medusa
from speculative.cost import Costs, rounds_needed
from speculative.metrics import total
from tests.pipeline.test_config import composed
from tests.speculative.tiny import KEPT, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore:.*litlogger.*")
VOCABULARY = torch.tensor(KEPT)
COSTS = Costs(1.0, 0.0, (1.0,) * 3, (0.0,) * 3, heads=0.1)
PROMPTS = [[1, 5, 9], [3, 2, 7, 7, 4], [6, 11]]


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def written(target):
    done = speculative.generate(target, None, PROMPTS, max_new_tokens=[9, 1, 14], states=True)
    return [HiddenRow(torch.tensor(tokens), states.clone()) for tokens, states in zip(done.tokens, done.states, strict=True)]


def module(target, vocabulary=None, count=2, objective=Objective(), **options) -> HeadDistillation:  # noqa: B008
    made = medusa_heads.build(target, count, vocabulary)
    head = (target.lm_head.weight.detach().clone(), None)
    settings = Optimizer(**{"learning_rate": 1e-2, "muon_learning_rate": 1e-2, "weight_decay": 0.0} | options)
    learner = HeadDistillation(made, head, target.config.vocab_size, objective, settings, 150, {"validation-0": 0.0}, COSTS)
    learner.trainer = L.Trainer(accelerator="cpu", barebones=True)
    return learner


@torch.no_grad()
def loss_of(learner, batch) -> float:
    return values(learner.objective, *learner.said(batch)).mean().item()


def pairs(rows, count):
    """(head, row, position) in the order of the module: head by head."""
    return [
        (k, row, j) for k in range(1, count + 1) for row in range(len(rows)) for j in range(max(len(rows[row].tokens) - k, 0))
    ]


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_head_k_is_held_to_the_distribution_k_positions_later(target, written, vocabulary):
    learner = module(target, vocabulary)
    with torch.no_grad():
        log_q, goal, ids = learner.said(collate(written))
    kept = torch.arange(48) if vocabulary is None else vocabulary
    assert len(pairs(written, 2)) == len(log_q)
    for place, (k, row, j) in enumerate(pairs(written, 2)):
        later = target.lm_head(written[row].states[j + k])[kept].softmax(-1)
        torch.testing.assert_close(goal.p[place], later, rtol=1e-4, atol=1e-6)
        token = int(written[row].tokens[j + k])
        assert ids[place] == (kept.tolist().index(token) if token in kept else -1)
        # Heads begin by repeating what the target says of the next token.
        now = target.lm_head(written[row].states[j])[kept].log_softmax(-1)
        torch.testing.assert_close(log_q[place], now, rtol=1e-4, atol=1e-5)


def test_later_heads_weigh_less(target, written):
    learner = module(target)
    batch = collate(written)
    with torch.no_grad():
        log_q, goal, _ = learner.said(batch)
        weights = learner._weights(batch, goal, log_q[:, 0])
    assert weights.tolist() == pytest.approx([DECAY ** (k - 1) for k, _, _ in pairs(written, 2)])


@pytest.mark.parametrize("objective", [Objective(), Objective(hard_weight=1.0)])
def test_heads_learn_what_the_target_writes_and_decode_it(target, written, objective):
    learner = module(target, objective=objective)
    batch = collate(written)
    learner.model.train()
    before = loss_of(learner, batch)
    runner = L.Trainer(
        accelerator="cpu", max_steps=150, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    runner.fit(learner, DataLoader([batch] * 150, batch_size=None, collate_fn=lambda one: one))
    assert loss_of(learner, batch) < before / 4
    options = {"max_new_tokens": [9, 1, 14], "num_draft_tokens": 2}
    done = speculative.generate(target, learner.model.eval(), PROMPTS, **options)
    assert done.tokens == [row.tokens.tolist() for row in written]
    assert total(done.acceptance).rate > 0.8


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_truth_is_the_whole_distribution_seen_from_the_draft_s_ids(target, written, vocabulary):
    learner, batch = module(target, vocabulary), collate(written)
    found = learner._truth(batch, (0, 0)).support(torch.arange(len(batch.tokens)))
    p = target.lm_head(batch.states).softmax(-1).detach()
    kept = torch.arange(48) if vocabulary is None else vocabulary
    for place, row in enumerate(p):
        whole = torch.zeros(len(kept)).scatter_add(0, found.ids[place], found.p[place])
        torch.testing.assert_close(whole, row[kept], rtol=1e-4, atol=1e-6)
    best = p.argmax(-1)
    q = torch.nn.functional.one_hot((kept == best[:, None]).long().argmax(-1), len(kept)).float().log()
    assert top1(q, found).bool().tolist() == [int(one) in kept.tolist() for one in best]


def test_the_promised_ratio_is_that_of_a_replay():
    """Two heads, one text of 5 tokens: no head knows the first token, the second head not the second."""
    learner = HeadTally([Tally(True), Tally(True)])
    first, second = [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0]
    for depth, right in ((1, first), (2, second)):
        learner.heads[depth - 1]._parts.append(torch.tensor([[r, r, 0.0, 0.0, 0.0] for r in right], dtype=torch.float64))
        learner.heads[depth - 1]._rows.append(len(right))
    learner._rows.append(5)
    # K = 1: 0 | 1 2 | 3 4: three rounds; K = 2: 0 | 1 2 | 3 4: head 1 misses token 2, read from where token 1 begins.
    levels = [[0.0, *first], [0.0, 0.0, *second]]

    def replay(drafts):
        place = rounds = 0
        while place < 5:
            m = 0
            while m < min(drafts, 4 - place) and levels[m][place + m]:
                m += 1
            place, rounds = place + m + 1, rounds + 1
        return rounds

    assert learner.ratio(COSTS) == pytest.approx(max(5 / (replay(k) * 1.1) for k in (1, 2)))


def test_rounds_by_depth_equal_the_mean_over_all_outcomes():
    first, second = [0.3, 0.9, 0.5, 0.7], [0.6, 0.2, 0.8, 0.4]
    expected = 0.0
    for kept in product((False, True), repeat=8):
        weight, place, rounds = 1.0, 0, 0
        for chance, yes in zip(first + second, kept, strict=True):
            weight *= chance if yes else 1 - chance
        while place < 4:
            m = 0
            while m < min(2, 3 - place) and kept[4 * m + place + m]:
                m += 1
            place, rounds = place + m + 1, rounds + 1
        expected += weight * rounds
    assert rounds_needed(first, 2, [second]) == pytest.approx(expected)


def test_held_out_agreement_is_what_greedy_decoding_finds(target, written):
    made = medusa_heads.build(target, 2, VOCABULARY)
    with torch.no_grad():
        for block in made.blocks:
            block.weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    answers = [
        Response(Request(n, "test", f"p{n}", "k", 0.0, tuple(prompt)), tuple(row.tokens.tolist()), False)
        for n, (prompt, row) in enumerate(zip(PROMPTS, written, strict=True))
    ]
    [found] = medusa_heads.measure(target, [made], answers, Sampling(0.0), "")
    logits = made(torch.cat([row.states for row in written]))
    at = 0
    for n, row in enumerate(written):
        count = len(row.tokens)
        assert found.acceptance[n][0] == 0.0
        for k in (1, 2):
            levels = [found.acceptance[n], *found.deeper[n]]
            for i in range(k, count):
                assert levels[k - 1][i] == float(VOCABULARY[logits[at + i - k, k - 1].argmax()] == row.tokens[i])
        at += count
    assert found.positions == sum(len(row.tokens) - 1 for row in written)


def test_held_out_answers_of_one_token_are_refused(target):
    one = Response(Request(0, "test", "p", "k", 0.0, (1, 2)), (3,), False)
    with pytest.raises(PipelineError, match="from an answer's second token on"):
        medusa_heads.measure(target, [medusa_heads.build(target, 1, None)], [one], Sampling(0.0), "")


def test_heads_of_another_target_are_refused(target, tmp_path):
    made = medusa_heads.build(target, 2, VOCABULARY)
    proposer.save(made, tmp_path, "one")
    again = proposer.load(tmp_path, torch.float32, "one")
    assert all(torch.equal(a, b) for a, b in zip(made.state_dict().values(), again.state_dict().values(), strict=True))
    with pytest.raises(PipelineError, match=r"draft\.kind=medusa: .* belong to the target one, not to two"):
        proposer.load(tmp_path, torch.float32, "two")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["codec=topk"], r"^codec\.kind=topk: Medusa heads learn from the target's hidden states; give codec=hidden"),
        (["codec=auto"], r"^codec\.kind=auto: .*give codec=hidden"),
        (["draft.heads=0"], r"^draft\.heads=0: give a number above 0"),
        (["draft.path=x"], r"^draft\.path=x: Medusa heads begin at the target's own head"),
        (["draft.width=64"], r"^draft\.width=64: Medusa heads are as wide as the target"),
        (["objective.reference=x", "objective.keep=0.5"], r"^objective\.reference=x: Medusa heads are trained on all"),
        (["decoding.draft_tokens=5"], r"^decoding\.draft_tokens=5: draft\.heads=4 heads draft no more"),
        (["export.format=gguf"], r"^export\.format=gguf: llama\.cpp has no Medusa heads"),
        (["export.format=both"], r"^export\.format=both: llama\.cpp has no Medusa heads"),
    ],
)
def test_what_heads_cannot_do_is_refused_early(overrides, message):
    codec = [] if overrides[0].startswith("codec") else ["codec=hidden"]
    with pytest.raises(PipelineError, match=message):
        check(composed("draft=medusa", *codec, *overrides))


@pytest.mark.parametrize("fault", [None, "weights", "output"])
def test_written_heads_are_read_back_and_decoded_with(target, tmp_path, monkeypatch, fault):
    made = medusa_heads.build(target, 2, VOCABULARY)
    medusa.save(made, tmp_path, "one")
    files = SimpleNamespace(fingerprint="one", load=lambda dtype: target.to(dtype))
    context = SimpleNamespace(target=files)
    if fault == "weights":
        made.matrix.weight.data[0, 0] += 1.0
    if fault == "output":  # an engine that takes the heads' word for it
        real = speculative.generate
        lying = SimpleNamespace(tokens=[[0] * heads_export.NEW_TOKENS] * 3)
        monkeypatch.setattr(speculative, "generate", lambda t, d, *a, **o: real(t, d, *a, **o) if d is None else lying)
    if fault is None:
        found = heads_export.prove(context, made, tmp_path, PROMPTS)
        assert found == {"same_weights": True, "same_output": True}
    else:
        said = {"weights": "do not hold the trained heads", "output": "change the target's greedy output"}[fault]
        with pytest.raises(PipelineError, match=said):
            heads_export.prove(context, made, tmp_path, PROMPTS)
