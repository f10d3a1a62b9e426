"""A target stands where its token is predicted, and the order of batches is a function of seed and step."""

from itertools import chain, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batching import LengthGroupedBatches, collate
from data.logit_cache import Row
from data.targets import SparseTargets


def row(tokens: list[int], start: int, k: int = 2) -> Row:
    """Targets carry their response token as id, so that their order can be read off."""
    response = torch.tensor(tokens[start:], dtype=torch.long)
    ids = response[:, None].repeat(1, k)
    return Row(torch.tensor(tokens), start, SparseTargets(ids, -ids.float(), -response.float() / 10))


def test_marks_by_hand():
    batch = collate([row([5, 6, 7, 8], 2), row([9, 10], 1), row([1, 2, 3, 4, 11, 12], 5)])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 0, 0], [9, 10, 0, 0, 0, 0], [1, 2, 3, 4, 11, 12]]
    # The last prompt token predicts the first response token; the last token predicts nothing.
    assert batch.predicts.int().tolist() == [[0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0]]
    assert batch.targets.ids.tolist() == [[7, 7], [8, 8], [10, 10], [12, 12]]
    assert batch.targets.log_probs[:, 0].tolist() == [-7.0, -8.0, -10.0, -12.0]
    assert batch.targets.log_tail.tolist() == pytest.approx([-0.7, -0.8, -1.0, -1.2])


texts = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 90)).map(
        lambda t: row(list(range(t[2], t[2] + t[0] + t[1])), t[0])
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=80)
@given(texts)
def test_every_mark_stands_before_the_token_of_its_target(rows):
    batch = collate(rows)
    assert int(batch.predicts.sum()) == len(batch.targets.ids) == len(batch.targets.log_tail)
    following = batch.tokens.roll(-1, dims=1)
    assert torch.equal(following[batch.predicts], batch.targets.ids[:, 0])  # row-major, as a mask selects
    for place, one in enumerate(rows):
        assert not batch.predicts[place, len(one.tokens) - 1 :].any()
        assert not batch.predicts[place, : one.start - 1].any()
        assert int(batch.predicts[place].sum()) == len(one.tokens) - one.start


def test_a_batch_moves_as_a_whole():
    moved = collate([row([1, 2, 3], 1)]).to(torch.device("meta"))
    tensors = (moved.tokens, moved.predicts, moved.targets.ids, moved.targets.log_probs, moved.targets.log_tail)
    assert {t.device.type for t in tensors} == {"meta"}


def lengths_of(count: int) -> list[int]:
    return [(i * 7919) % 101 + 1 for i in range(count)]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 150), st.integers(1, 5), st.integers(0, 9))
def test_every_row_comes_once_an_epoch(count, size, seed):
    epoch = -(-count // size)  # a window holds whole batches, so only the last batch may be short
    stream = iter(LengthGroupedBatches(lengths_of(count), size, 2 * epoch, seed))
    for _ in range(2):
        batches = list(islice(stream, epoch))
        assert all(1 <= len(batch) <= size for batch in batches)
        assert sorted(chain.from_iterable(batches)) == list(range(count))
    assert next(stream, None) is None


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 50), st.integers(0, 60), st.integers(0, 9))
def test_a_resumed_run_sees_the_rest_of_an_undisturbed_one(count, size, steps, start, seed):
    whole = list(LengthGroupedBatches(lengths_of(count), size, steps, seed))
    assert len(whole) == steps
    assert list(LengthGroupedBatches(lengths_of(count), size, steps, seed, start)) == whole[start:]


def test_the_length_is_that_of_the_whole_run():
    # Lightning counts the batches of a resumed run from its first step on.
    assert len(LengthGroupedBatches(lengths_of(10), 3, 25, seed=0)) == 25
    assert len(LengthGroupedBatches(lengths_of(10), 3, 25, seed=0, start=7)) == 25


def test_a_longer_run_begins_like_a_shorter_one():
    short, long = (list(LengthGroupedBatches(lengths_of(50), 4, steps, seed=1)) for steps in (9, 40))
    assert long[:9] == short


def test_the_order_depends_on_seed_and_epoch_alone():
    lengths = lengths_of(64)
    first = list(LengthGroupedBatches(lengths, 4, 32, seed=0))
    torch.manual_seed(99)
    assert list(LengthGroupedBatches(lengths, 4, 32, seed=0)) == first
    assert list(LengthGroupedBatches(lengths, 4, 32, seed=1)) != first
    assert first[:16] != first[16:]


def test_rows_of_similar_length_share_a_batch():
    lengths = lengths_of(64)  # one window: batches are slices of the sorted rows
    made = sorted(sorted(lengths[i] for i in batch) for batch in LengthGroupedBatches(lengths, 4, 16, seed=0))
    assert list(chain.from_iterable(made)) == sorted(lengths)
    order = [min(lengths[i] for i in batch) for batch in LengthGroupedBatches(lengths, 4, 16, seed=0)]
    assert order != sorted(order)  # short and long batches are mixed in time
