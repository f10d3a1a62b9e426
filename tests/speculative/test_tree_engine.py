"""Trees write what plain decoding writes: token for token when greedy, in law when sampled.

The rest is what a tree adds: rows that do not see their neighbours' branches, ends inside a branch, and the refusal, by name,
of what a tree cannot do.
"""

from dataclasses import replace

import pytest
import torch

from speculative import Controls, Costs, PromptLookup, Sampling, Tree, engine, generate, stream
from speculative.cache import UnsupportedModelError
from speculative.metrics import total
from speculative.sampling import draw
from speculative.tree_verification import verify_tree
from tests.speculative.laws import chi_square, decode
from tests.speculative.oracles import BUDGETS, FAMILIES, PROMPTS, TREES, WARM, cut, transformers_greedy
from tests.speculative.tiny import perturbed, tiny

GREEDY = Sampling(0.0)
ROWS = 4000  # of a chi-square

# Greedy: the same tokens


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_equals_plain_and_transformers(kind):
    target = tiny(kind)
    want = [transformers_greedy(target, prompt, 14) for prompt in PROMPTS]
    pool = {"other": tiny(kind, seed=1), "near": perturbed(target, 0.02), "same": target}
    for name, model in pool.items():
        for tree in (TREES["wide"], TREES["uneven"]):
            done = generate(target, model, PROMPTS, max_new_tokens=14, tree=tree)
            assert done.tokens == want, (name, tree)
            assert (name != "same") or total(done.acceptance).rate == 1


def test_greedy_with_a_trimmed_draft(target, drafts):
    want = generate(target, None, PROMPTS, max_new_tokens=20).tokens
    for tree in TREES.values():
        done = generate(target, drafts["trimmed"], PROMPTS, max_new_tokens=20, tree=tree)
        assert done.tokens == want
        assert 0.1 < total(done.acceptance).rate < 1


def test_branches_keep_more_than_a_chain_of_the_same_depth(target, drafts):
    for sampling in (GREEDY, WARM):
        options = {"draft": drafts["near"], "max_new_tokens": 20, "sampling": sampling}
        chain, tree = (total(decode(target, PROMPTS, tree=shape, **options).acceptance) for shape in [(1, 1, 1), (3, 2, 2)])
        assert tree.tokens_per_round > 1.15 * chain.tokens_per_round


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["other", "near", "same", "trimmed"])
def test_a_tree_of_width_one_writes_what_the_chain_writes(target, drafts, name, sampling):
    options = {"draft": drafts[name], "max_new_tokens": BUDGETS, "sampling": sampling, "seed": 4, "log_probs": True}
    chain, tree = decode(target, PROMPTS, num_draft_tokens=3, **options), decode(target, PROMPTS, tree=(1, 1, 1), **options)
    assert (chain.tokens, chain.acceptance, chain.draft_forwards) == (tree.tokens, tree.acceptance, tree.draft_forwards)
    for ours, theirs in zip(chain.log_probs, tree.log_probs, strict=True):
        assert ours == pytest.approx(theirs)


# Sampled: the same law


@pytest.mark.parametrize(
    ("name", "tree", "sampling"),
    [
        ("other", (3, 2), Sampling()),
        ("other", (2, 2), Sampling(temperature=1.5, top_k=3)),
        ("near", (3, 1), Sampling(temperature=1.5, top_p=0.8)),
        ("same", (2, 2), Sampling()),
        ("trimmed", (3, 2), Sampling()),
        ("other", Tree((0, 0, 2)), Sampling(temperature=2.0)),
    ],
)
def test_sampled_tokens_follow_the_target_s_law(small, name, tree, sampling):
    model, drafts = small
    p_value, rate = chi_square(model, drafts[name], sampling, rows=ROWS, count=None, tree=tree)
    assert p_value > 1e-3
    assert 0.1 < rate <= 1


def residual_of_p(p, branches, accept, follow, limits):
    """The token after a rejection drawn from p itself."""
    verdict = verify_tree(p, branches, accept, follow, limits)
    row = torch.arange(len(p))
    last = torch.nn.functional.pad(verdict.path, (1, 0))[row, verdict.accepted]
    return replace(verdict, following=draw(p[row, last], follow[row, verdict.accepted]))


def siblings_without_q(p, branches, accept, follow, limits):
    return verify_tree(p, replace(branches, q=branches.q.roll(1, 1)), accept, follow, limits)


@pytest.mark.parametrize("fault", [residual_of_p, siblings_without_q])
def test_the_chi_square_sees_a_planted_fault(small, fault, monkeypatch):
    model, drafts = small
    monkeypatch.setattr(engine, "verify_tree", fault)
    assert chi_square(model, drafts["other"], Sampling(), rows=ROWS, count=None, tree=(3, 2))[0] < 1e-6


# Rows, ends, controls


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budgets", [[20] * 6, BUDGETS], ids=["even", "ragged"])
@pytest.mark.parametrize("name", ["near", "trimmed"])
def test_a_batch_equals_its_rows_alone(target, drafts, name, budgets, sampling):
    options = {"draft": drafts[name], "tree": (3, 2, 1), "sampling": sampling, "seed": 5, "eos_token_ids": [17, 33]}
    whole = decode(target, PROMPTS, max_new_tokens=budgets, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = decode(target, [prompt], max_new_tokens=budgets[row], row_keys=[row], **options)
        assert (whole.tokens[row], whole.finish[row]) == (alone.tokens[0], alone.finish[0]), row
        assert whole.acceptance[row] == alone.acceptance[0], row


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["near", "same"])
def test_every_token_as_eos_cuts_the_text_that_runs_on(target, drafts, name, sampling):
    options = {"max_new_tokens": 14, "draft": drafts[name], "tree": (2, 2, 1), "sampling": sampling, "seed": 3}
    free = decode(target, PROMPTS, **options).tokens
    for eos in range(0, 48, 6):
        done = decode(target, PROMPTS, eos_token_ids=[eos, eos + 1], **options)
        assert done.tokens == [cut(row, (eos, eos + 1)) for row in free]
        assert [part.emitted for part in done.acceptance] == list(map(len, done.tokens))


@pytest.mark.parametrize("budget", [0, 1, 2, 4, 5])
def test_budgets(target, drafts, budget):
    want = decode(target, PROMPTS, max_new_tokens=budget).tokens
    for name in ("near", "same"):
        done = decode(target, PROMPTS, draft=drafts[name], max_new_tokens=budget, tree=(3, 2, 1))
        assert done.tokens == want
        assert [part.emitted for part in done.acceptance] == [budget] * 6
        if name == "same":
            assert [part.target_forwards for part in done.acceptance] == [-(-budget // 4)] * 6


def test_the_whole_context_can_be_used(target, drafts):
    options = {"draft": drafts["near"], "tree": (3, 2, 1), "max_new_tokens": 28}
    assert decode(target, [[1] * 100], **options).tokens == decode(target, [[1] * 100], max_new_tokens=28).tokens


def test_controls_see_the_branch_that_leads_to_a_node(target, drafts):
    controls = Controls(repetition_penalty=1.4, frequency_penalty=0.5, min_new_tokens=6, logit_bias={3: -2.0})
    options = {"max_new_tokens": 16, "controls": controls, "eos_token_ids": [17]}
    for name in ("near", "trimmed"):
        done = decode(target, PROMPTS, draft=drafts[name], tree=(3, 2, 1), **options)
        assert done.tokens == decode(target, PROMPTS, **options).tokens
        assert total(done.acceptance).rate > 0.1
    sampled = options | {"sampling": WARM, "seed": 2, "draft": drafts["near"]}
    assert (
        decode(target, PROMPTS, tree=(1, 1), **sampled).tokens == decode(target, PROMPTS, num_draft_tokens=2, **sampled).tokens
    )


def test_a_stream_of_a_tree_is_its_result(target, drafts):
    options = {"max_new_tokens": 12, "tree": (2, 2), "sampling": WARM, "seed": 6}
    rows = [[] for _ in PROMPTS]
    for piece in stream(target, drafts["near"], PROMPTS, **options):
        rows[piece.row] += piece.tokens
    assert rows == generate(target, drafts["near"], PROMPTS, **options).tokens


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verification": "block"}, "judged token by token; verification='block' needs a chain"),
        ({"verification": "match"}, "verification='match' needs a chain"),
        ({"lookup": PromptLookup()}, "leave out lookup"),
        ({"confidence": 0.4}, "confidence needs a chain"),
        ({"num_draft_tokens": 3}, "leave out num_draft_tokens"),
        ({"num_draft_tokens": Costs(0.01, 0.1, (0.9, 1.0), (0.1, 0.1))}, "leave out num_draft_tokens"),
        ({"tree": (2, 0)}, "branches ≥ 1 for every depth"),
        ({"tree": 3}, "branches ≥ 1 for every depth, not 3"),
        ({"tree": "auto"}, "branches ≥ 1 for every depth, not 'auto'"),
        ({"tree": (True, 2)}, "branches ≥ 1 for every depth"),
        ({"tree": (20, 20)}, "more than 128 nodes"),
        ({"tree": (49,)}, "49 branches at a node, the draft only 48 output ids"),
        ({"verification": "exact"}, "verification must be one of"),
    ],
)
def test_what_a_tree_cannot_do_is_refused_by_name(target, drafts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(target, drafts["near"], PROMPTS, **{"max_new_tokens": 4, "tree": (2, 2)} | options)


def test_a_tree_needs_a_draft(target):
    with pytest.raises(ValueError, match="tree: it is drafted by a model; give a draft"):
        generate(target, None, PROMPTS, max_new_tokens=4, tree=(2, 2))


def test_processors_with_a_state_are_refused(target, drafts):
    class Counting:
        calls = 0

        def __call__(self, ids, logits):
            self.calls += 1
            return logits - self.calls

    with pytest.raises(ValueError, match="processor Counting: its answer changes"):
        generate(target, drafts["near"], PROMPTS, max_new_tokens=4, tree=(2, 2), controls=Controls(processors=[Counting()]))


def test_a_model_that_takes_a_slot_for_a_position_is_refused():
    """It decodes chains exactly, where both are one."""
    model = tiny("mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=128)
    assert generate(model, model, PROMPTS, max_new_tokens=6).tokens == generate(model, None, PROMPTS, max_new_tokens=6).tokens
    with pytest.raises(UnsupportedModelError, match=r"mpt: .*cannot verify a tree"):
        generate(model, tiny(), PROMPTS, max_new_tokens=6, tree=(2, 2))
    with pytest.raises(UnsupportedModelError, match=r"mpt: .*cannot verify a tree"):
        generate(tiny(), model, PROMPTS, max_new_tokens=6, tree=(2, 2))
