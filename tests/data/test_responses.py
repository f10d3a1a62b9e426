"""Responses survive Parquet bit for bit, and batches hold every request once at one temperature."""

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.responses import Request, Response, batches, read_shards, write_shard


def request(key: int, temperature: float = 0.0, length: int = 3) -> Request:
    return Request(key, "train", f"id{key}", "write", temperature, tuple(range(length)))


def test_responses_survive_parquet_in_the_order_of_shards_and_rows(tmp_path):
    first = [
        Response(Request(7, "train", "é", "explain", 0.7, (1, 151_935, 0)), (5, 5, 2), True),
        Response(Request(3, "test", "b", "write", 0.0, (4,)), (), False),
    ]
    second = [Response(request(10**12, temperature=1.0), (49_151,), False)]
    write_shard(tmp_path / "shard-00010.parquet", second)
    write_shard(tmp_path / "shard-00002.parquet", (r for r in first))
    assert list(read_shards(tmp_path)) == first + second
    assert [r.length for r in first] == [6, 1]


def test_a_failed_shard_leaves_nothing(tmp_path):
    def rows():
        yield Response(request(1), (1,), True)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_shard(tmp_path / "shard-00000.parquet", rows())
    assert list(tmp_path.iterdir()) == []
    assert list(read_shards(tmp_path)) == []


def test_batches_by_hand():
    a, b, c, d, e = (request(k, t, n) for k, t, n in ((0, 1.0, 2), (1, 0.0, 2), (2, 1.0, 5), (3, 1.0, 3), (4, 1.0, 5)))
    assert batches([a, b, c, d, e], 2) == [[b], [c, e], [d, a]]
    assert batches([], 2) == []


asked = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 9)), max_size=40)


@settings(deadline=None, max_examples=100)
@given(asked, st.integers(1, 7), st.randoms(use_true_random=False))
def test_batches_hold_every_request_once_at_one_temperature_longest_first(rows, size, random):
    requests = [request(key, temperature, length) for key, (temperature, length) in enumerate(rows)]
    made = batches(requests, size)
    assert sorted(r.key for batch in made for r in batch) == list(range(len(rows)))
    for batch in made:
        assert 1 <= len(batch) <= size
        assert len({r.temperature for r in batch}) == 1
    for temperature, count in Counter(t for t, _ in rows).items():
        group = [batch for batch in made if batch[0].temperature == temperature]
        lengths = [len(r.prompt) for batch in group for r in batch]
        assert lengths == sorted(lengths, reverse=True)
        assert len(group) == -(-count // size)  # no batch is cut short but the last
    random.shuffle(requests)
    assert batches(requests, size) == made


def test_an_id_that_is_held_takes_eight_bytes(tmp_path):
    """A list of Python's numbers takes 36 bytes for each: the stages that hold all responses would need that much."""
    count, length = 100, 2000
    ids = [tuple(300 + (7919 * row + 31 * place) % 1000 for place in range(length)) for row in range(count)]
    write_shard(tmp_path / "shard-00000.parquet", (Response(request(row), tokens, True) for row, tokens in enumerate(ids)))
    list(read_shards(tmp_path))  # what libraries load once is theirs
    tracemalloc.start()
    try:
        held = list(read_shards(tmp_path))
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert [response.tokens for response in held] == ids
    assert 8 <= size / (count * length) < 10
