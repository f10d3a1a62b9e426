"""Speculative decoding writes what plain decoding writes: token for token when greedy, in law when sampled.

The rest is what that rests on: caches equal to a fresh prefill after every round, rows that do not see their
neighbours, ends at EOS and budget wherever they fall in a block, and refusal of what cannot be decoded exactly.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from speculative import Costs, Draft, PromptLookup, Sampling, api, engine, generate
from speculative.cache import CachedModel, UnsupportedModelError
from speculative.drafters import ModelDrafter
from speculative.metrics import total
from speculative.rows import Rows
from speculative.sampling import draw
from speculative.verification import Verdict, verify_sampled
from tests.speculative.laws import chi_square, decode
from tests.speculative.tiny import DOUBLE, perturbed, tiny

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "gpt_neox", "gpt2"]
PROMPTS = [[5, 9, 3, 7], [1, 2, 3, 4, 5, 6, 7, 8], [30], [11, 12, 13, 14, 15, 16], [40, 41, 42], [20, 9]]
WARM = Sampling(temperature=0.8, top_k=30, top_p=0.95)


def transformers_greedy(model, prompt, new_tokens):
    ids = torch.tensor([prompt])
    done = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return done[0, len(prompt) :].tolist()


# Greedy: the same tokens


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_equals_plain_and_transformers(kind):
    target = tiny(kind)
    want = [transformers_greedy(target, prompt, 16) for prompt in PROMPTS]
    assert len({token for row in want for token in row}) > 5
    assert generate(target, None, PROMPTS, max_new_tokens=16).tokens == want
    pool = {"other": tiny(kind, seed=1), "near": perturbed(target, 0.02), "same": target}
    for name, model in pool.items():
        rates = []
        for drafts in range(1, 7):
            done = generate(target, Draft(model), PROMPTS, max_new_tokens=16, num_draft_tokens=drafts)
            assert done.tokens == want, (name, drafts)
            rates.append(total(done.acceptance).rate)
        assert {"other": max(rates) < 0.5, "near": 0.1 < min(rates) < 1, "same": min(rates) == 1}[name], (name, rates)


@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.parametrize("name", ["trimmed", "gpt2"])
def test_greedy_with_a_trimmed_or_foreign_draft(target, drafts, name, count):
    done = generate(target, drafts[name], PROMPTS, max_new_tokens=20, num_draft_tokens=count)
    assert done.tokens == generate(target, None, PROMPTS, max_new_tokens=20).tokens
    assert total(done.acceptance).proposed > 0


def test_a_trimmed_draft_is_right_where_the_choice_is_in_its_vocabulary(target, drafts):
    done = generate(target, drafts["trimmed"], PROMPTS, max_new_tokens=20, num_draft_tokens=3)
    assert 0.1 < total(done.acceptance).rate < 1


# Sampled: the same law

SETTINGS = {
    "T 1": Sampling(temperature=1.0),
    "T 0.5": Sampling(temperature=0.5),
    "T 2": Sampling(temperature=2.0),
    "top-k": Sampling(temperature=1.5, top_k=3),
    "top-p": Sampling(temperature=1.5, top_p=0.8),
    "min-p": Sampling(temperature=1.5, min_p=0.3),
    "typical": Sampling(temperature=1.5, typical_p=0.7),
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("plain", "T 1"),
        *(("other", setting) for setting in SETTINGS),
        ("near", "T 1"),
        ("same", "T 1"),
        ("trimmed", "T 1"),
        ("trimmed", "top-p"),
    ],
)
def test_sampled_tokens_follow_the_target_s_law(small, name, setting):
    model, drafts = small
    p_value, rate = chi_square(model, drafts[name], SETTINGS[setting])
    assert p_value > 1e-3
    if name in ("other", "near", "trimmed"):
        assert 0.1 < rate < 0.97


@pytest.mark.parametrize("verification", ["block", "match"])
@pytest.mark.parametrize("name", ["other", "near", "same", "trimmed"])
def test_the_other_rules_have_the_law_too(small, name, verification):
    model, drafts = small
    assert chi_square(model, drafts[name], SETTINGS["T 1"], count=3, verification=verification)[0] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["token", "block", "match"])
@pytest.mark.parametrize("setting", ["T 1", "top-p"])
def test_sixty_thousand_rows_follow_the_target_s_law(small, setting, verification):
    model, drafts = small
    p_value, _ = chi_square(model, drafts["other"], SETTINGS[setting], rows=60_000, count=3, verification=verification)
    assert p_value > 1e-3


def test_matching_writes_what_plain_sampling_writes(target, drafts):
    options = {"max_new_tokens": 20, "sampling": WARM, "seed": 8, "eos_token_ids": [17, 33]}
    plain = generate(target, None, PROMPTS, **options).tokens
    for draft in drafts.values():
        assert generate(target, draft, PROMPTS, num_draft_tokens=4, verification="match", **options).tokens == plain


def test_blocks_keep_more_drafts_than_tokens(small):
    model, drafts = small
    rates = {
        rule: chi_square(model, drafts["other"], SETTINGS["T 1"], count=3, new_tokens=4, verification=rule)[1]
        for rule in ("match", "token", "block")
    }
    assert rates["match"] < rates["token"] < rates["block"]


def no_residual(p, guess, accept, follow, limits, rule):
    verdict = verify_sampled(p, guess, accept, follow, limits, rule)
    row = torch.arange(len(p))
    return Verdict(verdict.accepted, draw(p[row, verdict.accepted], follow[row, verdict.accepted]))


def one_uniform_for_both(p, guess, accept, follow, limits, rule):
    return verify_sampled(p, guess, accept, torch.cat([accept, follow[:, -1:]], 1), limits, rule)


def tempered_draft(p, guess, accept, follow, limits, rule):
    flat = guess.q.sqrt() / guess.q.sqrt().sum(-1, keepdim=True)
    return verify_sampled(p, replace(guess, q=flat), accept, follow, limits, rule)


@pytest.mark.parametrize("fault", [no_residual, one_uniform_for_both, tempered_draft])
def test_the_chi_square_sees_a_planted_fault(small, fault, monkeypatch):
    model, drafts = small
    monkeypatch.setattr(engine, "verify_sampled", fault)
    p_value, _ = chi_square(model, drafts["other"], SETTINGS["T 1"], rows=20_000)
    assert p_value < 1e-6


def test_sampling_does_not_touch_the_global_generator(target, drafts):
    before = torch.get_rng_state()
    generate(target, drafts["near"], PROMPTS, max_new_tokens=9, num_draft_tokens=3, sampling=WARM)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_give_different_texts_and_one_seed_the_same(target, drafts):
    def texts(seed):
        return generate(target, drafts["near"], PROMPTS, max_new_tokens=12, num_draft_tokens=3, sampling=WARM, seed=seed).tokens

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


# Rows do not see their neighbours

BUDGETS = [20, 3, 11, 1, 16, 7]


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budgets", [[20] * 6, BUDGETS], ids=["even", "ragged"])
@pytest.mark.parametrize("name", ["plain", "other", "near", "same", "trimmed"])
def test_a_batch_equals_its_rows_alone(target, drafts, name, budgets, sampling):
    options = {"draft": drafts.get(name), "num_draft_tokens": 4, "sampling": sampling, "seed": 5}
    options["eos_token_ids"] = [17, 33]
    whole = decode(target, PROMPTS, max_new_tokens=budgets, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = decode(target, [prompt], max_new_tokens=budgets[row], row_keys=[row], **options)
        assert whole.tokens[row] == alone.tokens[0], row
        assert whole.stopped[row] == alone.stopped[0], row


def test_rows_of_one_prompt_differ_by_their_keys_alone(target, drafts):
    options = {"max_new_tokens": 15, "draft": drafts["near"], "num_draft_tokens": 3, "sampling": WARM}
    keys = [7, 3, 99, 3]
    done = decode(target, [PROMPTS[0]] * 4, row_keys=keys, **options).tokens
    assert done[1] == done[3]
    assert len({tuple(row) for row in done}) == 3
    mixed = [PROMPTS[1], PROMPTS[0], PROMPTS[0], PROMPTS[2]]
    assert decode(target, mixed, row_keys=[1, 99, 7, 3], **options).tokens[1:3] == [done[2], done[0]]


def test_rows_that_leave_early_do_not_disturb_the_others(target, drafts, monkeypatch):
    options = {"draft": drafts["near"], "num_draft_tokens": 3, "sampling": WARM}
    selected = []
    real = CachedModel.feed
    monkeypatch.setattr(CachedModel, "feed", lambda self, t, *a, **k: selected.append(len(t)) or real(self, t, *a, **k))
    done = decode(target, PROMPTS, max_new_tokens=[2, 30, 2, 2, 9, 30], **options).tokens
    assert {2, 6} <= set(selected)  # the batch did shrink
    monkeypatch.setattr(engine, "COMPACT_BELOW", 0.0)
    assert decode(target, PROMPTS, max_new_tokens=[2, 30, 2, 2, 9, 30], **options).tokens == done


# Ends


def cut(tokens, eos):
    places = [place for place, token in enumerate(tokens) if token in eos]
    return tokens[: places[0] + 1] if places else tokens


@pytest.mark.parametrize("place", range(8))
def test_eos_at_every_place_of_a_block(target, drafts, place):
    """All drafts are right and K = 4: places 0 to 3 are drafts, 4 is the bonus token, 5 to 7 are drafts again."""
    prompt = [2, 20]
    plain = generate(target, None, [prompt], max_new_tokens=20).tokens[0]
    assert len(set(plain[:8])) == 8
    options = {"max_new_tokens": 20, "draft": drafts["same"], "num_draft_tokens": 4}
    done = decode(target, [prompt], eos_token_ids=[plain[place]], **options)
    assert done.tokens == [plain[: place + 1]]
    assert done.stopped == [True]
    counts = done.acceptance[0]
    assert counts.emitted == place + 1
    drafted = place + 1 if place < 4 else 4 + max(place - 4, 0)
    assert (counts.proposed, counts.accepted, counts.target_forwards) == (drafted, drafted, 1 if place < 5 else 2)


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["other", "near", "same"])
def test_every_token_as_eos_cuts_the_text_that_runs_on(target, drafts, name, sampling):
    options = {"max_new_tokens": 14, "draft": drafts[name], "num_draft_tokens": 4, "sampling": sampling, "seed": 3}
    free = decode(target, PROMPTS, **options).tokens
    for eos in range(0, 48, 3):
        done = decode(target, PROMPTS, eos_token_ids=[eos, eos + 1], **options)
        assert done.tokens == [cut(row, (eos, eos + 1)) for row in free]
        assert done.stopped == [bool({eos, eos + 1} & set(row)) for row in free]
        assert [part.emitted for part in done.acceptance] == list(map(len, done.tokens))


def test_an_eos_that_only_the_draft_wants_ends_nothing(target, monkeypatch):
    plain = generate(target, None, [PROMPTS[0]], max_new_tokens=20).tokens[0]
    proposed = set()
    real = ModelDrafter.propose

    def watch(self, *args):
        proposal = real(self, *args)
        proposed.update(proposal.guess.tokens.flatten().tolist())
        return proposal

    monkeypatch.setattr(ModelDrafter, "propose", watch)
    options = {"max_new_tokens": 20, "draft": Draft(tiny(seed=1, dtype=DOUBLE)), "num_draft_tokens": 4}
    decode(target, [PROMPTS[0]], **options)
    unwanted = sorted(proposed - set(plain))
    assert unwanted
    done = decode(target, [PROMPTS[0]], eos_token_ids=unwanted, **options)
    assert (done.tokens, done.stopped) == ([plain], [False])


def test_a_prompt_that_holds_an_eos_goes_on(target):
    free = generate(target, None, [PROMPTS[0]], max_new_tokens=10).tokens[0]
    eos = next(token for token in range(48) if token not in free)
    prompt = [eos, *PROMPTS[0]]
    done = generate(target, None, [prompt], max_new_tokens=10, eos_token_ids=[eos])
    assert len(done.tokens[0]) == 10


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["plain", "other", "same"])
@pytest.mark.parametrize("budget", [0, 1, 2, 4, 5, 6])
def test_budgets(target, drafts, name, budget, sampling):
    options = {"draft": drafts.get(name), "num_draft_tokens": 4, "sampling": sampling}
    done = decode(target, PROMPTS, max_new_tokens=budget, **options)
    if sampling.greedy:  # a sampled text may end otherwise: its last token is then drawn and not drafted
        longer = decode(target, PROMPTS, max_new_tokens=20, **options)
        assert done.tokens == [row[:budget] for row in longer.tokens]
    assert list(map(len, done.tokens)) == [budget] * 6
    assert not any(done.stopped)
    for part in done.acceptance:
        assert part.emitted == budget
        assert part.proposed >= part.accepted
    if name == "same":
        assert [part.target_forwards for part in done.acceptance] == [-(-budget // 5)] * 6


@pytest.mark.parametrize("name", ["plain", "other", "near", "same", "trimmed"])
def test_counts_add_up_to_the_tokens(target, drafts, name):
    done = generate(
        target, drafts.get(name), PROMPTS, max_new_tokens=BUDGETS, num_draft_tokens=4, sampling=WARM, eos_token_ids=range(4)
    )
    assert [part.emitted for part in done.acceptance] == list(map(len, done.tokens))
    for part in done.acceptance:
        assert part.accepted <= part.emitted <= part.accepted + part.target_forwards
        assert part.target_forwards <= part.emitted


# Caches


def keys_and_values(model, tokens):
    cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def compare(cached, row, tokens):
    for layer, fresh in zip(cached.cache.layers, keys_and_values(cached.model, tokens), strict=True):
        for store, want in zip((layer.keys, layer.values), fresh, strict=True):
            torch.testing.assert_close(store[row, :, : len(tokens)], want[0], rtol=0, atol=1e-10)


@pytest.fixture
def audit(monkeypatch, rests):
    """Compare every row of both caches with a fresh prefill after every round.

    Collects (kept, made) drafts by round, and how far the draft's cache fell behind the anchor.
    """
    found, models, state = SimpleNamespace(rounds=[], behind=0), [], {}
    real = Rows.commit

    class Watched(CachedModel):
        def __init__(self, *args):
            super().__init__(*args)
            models.append(self)

    class Audited(ModelDrafter):
        def rollback(self, lengths):
            super().rollback(lengths)
            for row, length in enumerate(lengths.tolist()):
                committed = state["tokens"][row, :length].tolist()
                compare(models[-1], row, committed[:-1])
                valid = int(self.lengths[row])
                # The bonus token, the draft before it, and rounds without drafts are not fed.
                assert 0 <= valid < length
                assert rests or length - 2 - (state["drafts"] == 0) <= valid
                found.behind = max(found.behind, length - 1 - valid)
                if valid:
                    compare(self.cached, row, committed[:valid])

    def commit(rows, block, verdict, eos, stop):
        alive = rows.alive
        result = real(rows, block, verdict, eos, stop)
        state.update(tokens=rows.tokens, drafts=block.shape[1] - 1)
        found.rounds.extend((kept, block.shape[1] - 1) for kept in verdict.accepted[alive].tolist())
        return result

    monkeypatch.setattr(engine, "CachedModel", Watched)
    monkeypatch.setattr(api, "ModelDrafter", Audited)
    monkeypatch.setattr(Rows, "commit", commit)
    return found


@pytest.fixture
def rests(request):
    """Whether the draft may be left out of rounds, and fall behind."""
    return getattr(request, "param", False)


LONG = [prompt * 2 for prompt in PROMPTS]
LOOPS = [[5, 9, 3] * 3, [8, 2] * 9, [4, 4, 4, 4]]
COSTS = Costs(0.01, 0.5, (0.9, 1.0, 1.1, 1.2), (0.1, 0.1, 0.1, 0.1))


@pytest.mark.parametrize("rests", [True], indirect=True)
@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["other", "near", "trimmed"])
@pytest.mark.parametrize("options", [{"lookup": PromptLookup(2, 2)}, {"num_draft_tokens": COSTS}])
def test_both_caches_are_right_when_the_draft_rests(target, drafts, audit, name, options, sampling):
    budgets = [60, 60, 9]
    done = generate(target, drafts[name], LOOPS, max_new_tokens=budgets, sampling=sampling, seed=1, **options)
    assert audit.behind > 1 or name == "other"  # sampled text that strays from the loops gives lookup little to find
    if sampling.greedy:
        assert done.tokens == decode(target, LOOPS, max_new_tokens=budgets).tokens


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["other", "near", "same", "trimmed"])
@pytest.mark.parametrize("count", [1, 3])
def test_both_caches_equal_a_fresh_prefill_after_every_round(target, drafts, audit, name, count, sampling):
    generate(target, drafts[name], LONG, max_new_tokens=[14, 3, 9, 2, 12, 14], num_draft_tokens=count, sampling=sampling)
    assert len(audit.rounds) > 10
    if name == "same":
        assert (count, count) in audit.rounds
    if name == "other":
        assert (0, count) in audit.rounds
    if name == "near" and count == 3:
        assert {0, 3} < {kept for kept, made in audit.rounds if made == 3}


def test_the_audit_sees_a_draft_cache_one_token_behind(target, drafts, audit, monkeypatch):
    """The published mistake: after a fully kept block the last draft, never fed, is taken for cached."""
    real = ModelDrafter.propose

    def forgetful(self, *args):
        proposal = real(self, *args)
        self.lengths = self.lengths + 1
        return proposal

    monkeypatch.setattr(ModelDrafter, "propose", forgetful)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        generate(target, drafts["same"], LONG, max_new_tokens=14, num_draft_tokens=3)


def test_logits_of_a_block_equal_those_of_one_forward(target):
    tokens = torch.tensor([[7, 3, 9, 1, 4, 4, 2], [5, 5, 8, 0, 6, 1, 9]])
    with torch.inference_mode():
        whole = target(tokens).logits
        cached = CachedModel(target, 2, 12)
        cached.prefill(tokens, torch.tensor([3, 3]))
        first = cached.feed(tokens[:, 3:5], torch.tensor([[3, 4], [3, 4]]), keep=2)
        # The second row forgets its last token and stands one behind the first.
        second = cached.feed(torch.stack([tokens[0, 5:7], tokens[1, 4:6]]), torch.tensor([[5, 6], [4, 5]]), keep=2)
    torch.testing.assert_close(first, whole[:, 3:5])
    torch.testing.assert_close(second, torch.stack([whole[0, 5:7], whole[1, 4:6]]))


def test_a_position_beyond_the_cache_is_refused(target):
    with pytest.raises(IndexError, match="position 4 lies outside a cache of 4 slots"), torch.inference_mode():
        CachedModel(target, 1, 4).feed(torch.tensor([[1]]), torch.tensor([[4]]), keep=1)


# What is refused


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([[1, 2], []], {}, "at least one token"),
        ([[1]], {"num_draft_tokens": -1}, "num_draft_tokens must lie between 0 and 128, not -1"),
        ([[1]], {"num_draft_tokens": 10**6}, "num_draft_tokens must lie between 0 and 128, not 1000000"),
        ([[1]], {"max_new_tokens": None}, "max_new_tokens: say how many"),
        ([[1, 48]], {}, "a prompt has token id 48, the target knows 0 … 47"),
        ([[1, -2]], {}, "a prompt has token id"),
        (["text"], {}, "prompts given as text need a tokenizer"),
        ([[1]], {"stop_strings": ["x"]}, "stop_strings need a tokenizer"),
        ([[1]], {"verification": "exact"}, "verification must be one of token, block, match, not 'exact'"),
        ([[1]], {"confidence": 1.5}, "confidence must lie in"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be one number ≥ 0"),
        ([[1]], {"max_new_tokens": [1, 2]}, "or one for each prompt"),
        ([[1] * 120], {"max_new_tokens": 9}, "need 129 positions, the target's context has 128"),
    ],
)
def test_inputs_are_refused_with_the_reason(target, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(target, None, prompts, **{"max_new_tokens": 5} | options)


def test_the_whole_context_can_be_used(target, drafts):
    options = {"max_new_tokens": 28, "draft": drafts["near"], "num_draft_tokens": 4}
    assert len(decode(target, [[1] * 100], **options).tokens[0]) == 28
    short = tiny("gpt2", seed=2, n_positions=64)
    own = generate(short, Draft(short), [[1] * 50], max_new_tokens=14, num_draft_tokens=4)
    assert len(own.tokens[0]) == 14
    with pytest.raises(ValueError, match="the draft's context has 64"):
        generate(target, Draft(short), [[1] * 60], max_new_tokens=5, num_draft_tokens=2)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_training_mode_is_refused(name):
    models = {"target": tiny(), "draft": tiny(seed=1)}
    models[name].train()
    with pytest.raises(ValueError, match=f"the {name} is in training mode"):
        generate(models["target"], Draft(models["draft"]), [[1]], max_new_tokens=3, num_draft_tokens=2)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral", {"sliding_window": 4}, "mistral: .*cannot be rolled back"),
        ("gemma2", {"head_dim": 8}, "gemma2: .*sliding_attention.*cannot be rolled back"),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, "qwen2: .*rolled back"),
        ("mamba", {"state_size": 8}, "mamba: .*cannot be rolled back"),
    ],
)
def test_caches_that_cannot_roll_back_are_refused(target, kind, changes, message):
    model = tiny(kind, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        generate(model, None, [[1, 2]], max_new_tokens=3)
    with pytest.raises(UnsupportedModelError, match=message):
        generate(target, Draft(model), [[1, 2]], max_new_tokens=3, num_draft_tokens=2)


@pytest.mark.parametrize("vocabulary", [[3, 1, 2], [1, 1, 2]])
def test_a_draft_vocabulary_out_of_order_is_refused(target, vocabulary):
    with pytest.raises(ValueError, match="sorted and without repeats"):
        Draft(target, torch.tensor(vocabulary))


def test_models_are_left_as_they_were(target, drafts):
    def snapshot(model):
        return copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict(), model.state_dict()))

    pair = (target, drafts["near"].model)
    before = [snapshot(model) for model in pair]
    generate(target, drafts["near"], PROMPTS, max_new_tokens=8, num_draft_tokens=3, sampling=WARM)
    for model, (config, generation, weights) in zip(pair, before, strict=True):
        assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation)
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
        assert not model.training


# Cases at the edge


def test_eager_attention_writes_the_same_text():
    target, eager = tiny(), tiny(implementation="eager")
    assert generate(eager, None, PROMPTS, max_new_tokens=12).tokens == generate(target, None, PROMPTS, max_new_tokens=12).tokens


def test_a_row_without_budget_and_a_prompt_of_one_token(target, drafts):
    options = {"max_new_tokens": [0, 12, 12, 12], "draft": drafts["same"], "num_draft_tokens": 3}
    done = decode(target, [[1], *PROMPTS[:3]], **options)
    assert done.tokens == [[], *generate(target, None, PROMPTS[:3], max_new_tokens=12).tokens]


def test_a_row_at_the_end_of_its_context_beside_one_at_its_start():
    model = tiny("gpt2", n_positions=32)
    prompts, budgets = [list(range(31)), [1]], [1, 20]
    done = generate(model, Draft(model), prompts, max_new_tokens=budgets, num_draft_tokens=4)
    assert done.tokens == [transformers_greedy(model, *pair) for pair in zip(prompts, budgets, strict=True)]


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
def test_counts_of_a_row_do_not_depend_on_its_neighbours(target, drafts, sampling):
    options = {"draft": drafts["same"], "num_draft_tokens": 6, "sampling": sampling, "seed": 5}
    whole = decode(target, PROMPTS, max_new_tokens=BUDGETS, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = decode(target, [prompt], max_new_tokens=BUDGETS[row], row_keys=[row], **options)
        assert whole.acceptance[row] == alone.acceptance[0], row


@pytest.mark.parametrize("keys", [[7], [1, 2, 3]])
def test_keys_must_be_one_for_each_row(target, keys):
    with pytest.raises(ValueError, match="row_keys"):
        generate(target, None, PROMPTS[:2], max_new_tokens=4, sampling=WARM, row_keys=keys)


@pytest.mark.parametrize("size", [40, 64])
def test_a_draft_of_another_vocabulary_size_is_refused(target, size):
    with pytest.raises(ValueError, match="vocabulary"):
        generate(target, Draft(tiny(vocabulary=size)), PROMPTS, max_new_tokens=8, num_draft_tokens=3)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4, "num_heads": 4}),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
        ("rwkv", {"attention_hidden_size": 32}),
    ],
)
def test_other_attention_is_refused_or_exact(kind, changes):
    model = tiny(kind, **changes)
    try:
        done = generate(model, None, PROMPTS, max_new_tokens=16).tokens
    except UnsupportedModelError:
        return
    assert done == [transformers_greedy(model, prompt, 16) for prompt in PROMPTS]
