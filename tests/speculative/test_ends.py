"""Rows end at EOS and budget wherever these fall in a block, and counts are those of the tokens that stay."""

import pytest
import torch

from speculative import Draft, Finish, Sampling, generate
from speculative.drafters import ModelDrafter
from tests.speculative.laws import decode
from tests.speculative.oracles import BUDGETS, PROMPTS, WARM, cut
from tests.speculative.tiny import DOUBLE, tiny


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


def test_one_eos_id_is_a_list_of_one(target):
    plain = generate(target, None, PROMPTS, max_new_tokens=14).tokens
    eos = plain[0][4]
    for given in (eos, [eos], torch.tensor(eos), torch.tensor([eos])):
        done = generate(target, None, PROMPTS, max_new_tokens=14, eos_token_ids=given)
        assert done.tokens == [cut(row, (eos,)) for row in plain]
        assert done.finish[0] is Finish.EOS


def test_rows_may_be_tensors(target):
    rows = [torch.tensor(row) for row in PROMPTS]
    assert generate(target, None, rows, max_new_tokens=4).tokens == generate(target, None, PROMPTS, max_new_tokens=4).tokens


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
