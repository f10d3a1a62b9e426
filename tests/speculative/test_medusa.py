"""Medusa heads draft chains and trees, and the output stays the target's; their states are those that the target's head read.

Heads of a random target are no good, so heads that know the text are made for it: their outputs are fitted to what the
target will say.
"""

import pytest
import torch

from speculative import Controls, Costs, MedusaHeads, PromptLookup, Sampling, Tree, engine, generate
from speculative.medusa import MedusaDrafter, load, save
from speculative.metrics import total
from speculative.rows import Rows
from tests.speculative.laws import SMALL, chi_square, decode
from tests.speculative.oracles import BUDGETS, FAMILIES, PROMPTS, WARM, cut
from tests.speculative.tiny import DOUBLE, KEPT, tiny

GREEDY = Sampling(0.0)
SHAPES = {"chain": {}, "short chain": {"num_draft_tokens": 2}, "tree": {"tree": (3, 2, 1)}, "uneven": {"tree": Tree((0, 0, 1))}}


def heads_of(model, count=3, vocabulary=None, seed=0):
    """The identity, a little disturbed: heads that repeat what the target says of the next token."""
    matrix = model.get_output_embeddings().weight
    rows = matrix if vocabulary is None else matrix[vocabulary]
    heads = MedusaHeads(count, matrix.shape[1], len(rows), vocabulary).to(model.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        heads.matrix.weight.copy_(rows)
        for block in heads.blocks:
            block.weight.copy_(0.3 * torch.randn(block.weight.shape, generator=generator, dtype=DOUBLE))
    return heads.eval()


@torch.no_grad()
def fitted(model, texts, count=3):
    """Heads whose one hidden layer was fitted, by plain gradient steps, to ``texts`` that the target wrote."""
    heads = heads_of(model, count)
    states = [model.base_model(torch.tensor([text])).last_hidden_state[0] for text in texts]
    with torch.enable_grad():
        optimizer = torch.optim.Adam(heads.parameters(), lr=0.02)
        for _ in range(60):
            losses = []
            for text, state in zip(texts, states, strict=True):
                logits = heads(state)
                for k in range(1, count + 1):
                    losses.append(torch.nn.functional.cross_entropy(logits[: -k - 1, k - 1], torch.tensor(text[k + 1 :])))
            optimizer.zero_grad()
            sum(losses).backward()
            optimizer.step()
    return heads


@pytest.fixture(scope="module")
def target():
    return tiny(dtype=DOUBLE)


@pytest.fixture(scope="module")
def heads(target):
    return {"untrained": heads_of(target), "trimmed": heads_of(target, vocabulary=torch.tensor(KEPT))}


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_equals_plain(kind):
    target = tiny(kind)
    want = generate(target, None, PROMPTS, max_new_tokens=14).tokens
    for options in SHAPES.values():
        done = generate(target, heads_of(target), PROMPTS, max_new_tokens=14, **options)
        assert done.tokens == want
        assert total(done.acceptance).proposed > 0


def test_heads_that_know_the_text_are_kept_to_the_end(target):
    plain = generate(target, None, PROMPTS, max_new_tokens=16).tokens
    knowing = fitted(target, [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)])
    for options in ({}, {"tree": (2, 2, 1)}):
        done = generate(target, knowing, PROMPTS, max_new_tokens=16, **options)
        assert done.tokens == plain
        assert total(done.acceptance).rate > 0.8
        assert total(done.acceptance).tokens_per_round > 2.5


@pytest.mark.parametrize("name", ["untrained", "trimmed"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_batches_ends_and_budgets(target, heads, name, shape):
    for sampling in (GREEDY, WARM):
        options = SHAPES[shape] | {"draft": heads[name], "sampling": sampling, "seed": 5}
        free = decode(target, PROMPTS, max_new_tokens=20, **options).tokens
        done = decode(target, PROMPTS, max_new_tokens=20, eos_token_ids=[17, 33], **options)
        assert done.tokens == [cut(row, (17, 33)) for row in free]
        whole = decode(target, PROMPTS, max_new_tokens=BUDGETS, **options)
        for row, prompt in enumerate(PROMPTS):
            alone = decode(target, [prompt], max_new_tokens=BUDGETS[row], row_keys=[row], **options)
            assert whole.tokens[row] == alone.tokens[0]
            assert whole.acceptance[row] == alone.acceptance[0]


@pytest.mark.parametrize("verification", ["token", "block", "match"])
def test_sampled_chains_follow_the_target_s_law(small, verification):
    model, _ = small
    p_value, rate = chi_square(model, heads_of(model), Sampling(), rows=4000, count=2, new_tokens=4, verification=verification)
    assert p_value > 1e-3
    assert 0.05 < rate < 1


@pytest.mark.parametrize("vocabulary", [None, [0, 1, 3, 4]])
def test_sampled_trees_follow_the_target_s_law(small, vocabulary):
    model, _ = small
    heads = heads_of(model, vocabulary=None if vocabulary is None else torch.tensor(vocabulary))
    assert heads.size == (SMALL if vocabulary is None else 4)
    assert chi_square(model, heads, Sampling(), rows=4000, count=None, new_tokens=4, tree=(3, 2))[0] > 1e-3


def test_the_chi_square_sees_heads_whose_q_is_another(small, monkeypatch):
    model, _ = small
    real = MedusaDrafter.propose

    def wrong(self, *args):
        proposal = real(self, *args)
        if proposal.guess.q is not None:
            flat = torch.full_like(proposal.guess.q, 1 / SMALL)
            object.__setattr__(proposal.guess, "q", flat)
        return proposal

    monkeypatch.setattr(MedusaDrafter, "propose", wrong)
    assert chi_square(model, heads_of(model), Sampling(), rows=4000, count=2, new_tokens=4)[0] < 1e-6


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_heads_see_the_state_that_the_newest_token_was_chosen_from(target, heads, monkeypatch, shape):
    seen, real_observe, real_commit = [], MedusaDrafter.observe, Rows.commit
    monkeypatch.setattr(MedusaDrafter, "observe", lambda self, states: seen.append(states) or real_observe(self, states))

    def commit(rows, *args):
        emitted = real_commit(rows, *args)
        for row in rows.alive.nonzero().flatten().tolist():
            committed = rows.tokens[row, : rows.lengths[row]]
            fresh = target.base_model(committed[None, :-1]).last_hidden_state[0, -1]
            torch.testing.assert_close(seen[-1][row], fresh, rtol=0, atol=1e-10)
        return emitted

    monkeypatch.setattr(Rows, "commit", commit)
    for sampling in (GREEDY, WARM):
        generate(target, heads["untrained"], PROMPTS, max_new_tokens=BUDGETS, sampling=sampling, **SHAPES[shape])
    assert len(seen) > 10


def test_the_state_of_another_token_is_a_fault_that_shows(target, monkeypatch):
    """Drafts from the anchor's place, whatever was kept: fewer stay."""
    plain = generate(target, None, PROMPTS, max_new_tokens=16).tokens
    knowing = fitted(target, [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)])
    monkeypatch.setattr(engine, "_last_kept", lambda verdict: torch.zeros_like(verdict.accepted))
    done = generate(target, knowing, PROMPTS, max_new_tokens=16)
    assert done.tokens == plain
    assert total(done.acceptance).rate < 0.8


def test_controls_and_chosen_lengths_work(target, heads):
    options = {"max_new_tokens": 16, "controls": Controls(repetition_penalty=1.4, min_new_tokens=4), "eos_token_ids": [17]}
    want = decode(target, PROMPTS, **options).tokens
    costs = Costs(0.01, 0.01, (0.9, 0.9, 0.9, 0.9), (0.1,) * 4)
    for shape in ({}, {"tree": (2, 2)}, {"num_draft_tokens": costs}):
        assert decode(target, PROMPTS, draft=heads["untrained"], **shape, **options).tokens == want


def test_the_first_round_has_no_drafts_and_the_target_keeps_no_hook(target, heads):
    done = generate(target, heads["untrained"], [[1, 2, 3]], max_new_tokens=1)
    assert (done.draft_forwards, done.acceptance[0].proposed) == (0, 0)
    assert not target.get_output_embeddings()._forward_pre_hooks


def test_a_head_worked_by_hand():
    """W = 1, b = 0, E = (1, 2): h = 1 gives 1 + SiLU(1) = 1.7311 before E; the second block, all zeros, gives h itself."""
    heads = MedusaHeads(2, 1, 2)
    with torch.no_grad():
        heads.blocks[0].weight.fill_(1.0)
        heads.matrix.weight.copy_(torch.tensor([[1.0], [2.0]]))
    found = heads(torch.tensor([[1.0]]))
    torch.testing.assert_close(found, torch.tensor([[[1.73106, 3.46212], [1.0, 2.0]]]), rtol=0, atol=1e-4)


def test_heads_are_loaded_as_they_were_saved(target, heads, tmp_path):
    for name, one in heads.items():
        save(one, tmp_path / name, "target-1")
        again = load(tmp_path / name, "target-1", DOUBLE)
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), again.state_dict().values(), strict=True))
        options = {"max_new_tokens": 8, "sampling": WARM}
        assert generate(target, again, PROMPTS, **options).tokens == generate(target, one, PROMPTS, **options).tokens
    with pytest.raises(ValueError, match="belong to the target target-1, not to target-2"):
        load(tmp_path / "trimmed", "target-2", DOUBLE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 4}, "there are 3 Medusa heads, they cannot draft 4 tokens deep"),
        ({"tree": (1, 1, 1, 1)}, "cannot draft 4 tokens deep"),
        ({"lookup": PromptLookup()}, "leave out lookup"),
        ({"confidence": 0.5}, "confidence needs a draft model"),
        ({"tree": (49,)}, "49 branches at a node, the draft only 48 output ids"),
        ({"tree": (43,), "vocabulary_size": 42}, "43 branches at a node, the draft only 42 output ids"),
    ],
)
def test_what_heads_cannot_do_is_refused_by_name(target, heads, options, message):
    with pytest.raises(ValueError, match=message):
        generate(target, heads["untrained"], PROMPTS, max_new_tokens=4, **options)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (lambda: MedusaHeads(2, 16, 48).double(), "read states of 16 numbers, the target's have 32"),
        (lambda: MedusaHeads(2, 32, 40).double(), "or lack a vocabulary"),
        (lambda: MedusaHeads(2, 32, 2, torch.tensor([3, 48])).double(), "with 48, does not have"),
        (lambda: MedusaHeads(2, 32, 48), "are torch.float32 on cpu, the target is torch.float64"),
    ],
)
def test_heads_of_another_target_are_refused(target, heads, message):
    with pytest.raises(ValueError, match=message):
        generate(target, heads(), PROMPTS, max_new_tokens=4)


def test_heads_that_can_name_padding_alone_are_refused(target):
    heads = heads_of(target, vocabulary=torch.tensor([20, 40]))
    assert generate(target, heads, [[1, 2]], max_new_tokens=4, vocabulary_size=21, tree=(1, 1)).tokens[0]
    with pytest.raises(ValueError, match="the Medusa heads have no id below 20, the number of the target's tokens"):
        generate(target, heads, [[1, 2]], max_new_tokens=4, vocabulary_size=20)
    with pytest.raises(ValueError, match="2 branches at a node, the draft only 1 output ids"):
        generate(target, heads, [[1, 2]], max_new_tokens=4, vocabulary_size=21, tree=(2, 1))


@pytest.mark.parametrize("vocabulary", [[3, 1], [1, 1], [1, 2, 3]])
def test_a_vocabulary_out_of_order_is_refused(vocabulary):
    with pytest.raises(ValueError, match="must be 2 target ids, sorted and without repeats"):
        MedusaHeads(1, 8, 2, torch.tensor(vocabulary))


def test_no_heads_are_refused():
    with pytest.raises(ValueError, match="one head or more, not 0"):
        MedusaHeads(0, 8, 2)
