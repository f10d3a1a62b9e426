"""What is stored of a distribution is what float64 says of it, and a row reads back as it was written."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.logit_cache import LogitCache

HALF = 2.0**-11  # relative rounding error of half precision


def noise(positions: int, vocabulary: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def test_a_distribution_by_hand():
    stored = compress(torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log() + 3.0, k=2)
    assert stored["ids"].tolist() == [[1, 3]]
    torch.testing.assert_close(stored["log_probs"].float(), torch.tensor([[0.5, 0.25]]).log(), atol=1e-3, rtol=0)
    torch.testing.assert_close(stored["log_normalizer"], torch.tensor([3.0]))
    torch.testing.assert_close(stored["log_tail"], torch.tensor([0.25]).log())


@settings(deadline=None, max_examples=25)
@given(st.integers(16, 70_000), st.integers(1, 300), st.floats(0.1, 8.0), st.integers(0, 1000))
def test_what_is_stored_agrees_with_float64(vocabulary, k, scale, seed):
    logits = noise(3, vocabulary, scale, seed)
    stored = compress(logits, k)
    k = min(k, vocabulary)
    ids = stored["ids"].long()
    assert ids.shape == (3, k)
    assert all(len(set(row)) == k for row in ids.tolist())
    assert torch.equal(logits.gather(1, ids), logits.sort(dim=-1, descending=True).values[:, :k])
    exact = logits.double().log_softmax(-1)
    kept = exact.gather(1, ids)
    assert stored["log_probs"].dtype is torch.float16
    assert bool(((stored["log_probs"].double() - kept).abs() <= HALF * kept.abs() + 1e-5).all())
    torch.testing.assert_close(stored["log_normalizer"].double(), logits.double().logsumexp(-1), atol=1e-5, rtol=1e-6)
    tail = exact.exp().scatter(1, ids, 0.0).sum(-1)
    torch.testing.assert_close(stored["log_tail"].double().exp(), tail, atol=5e-6, rtol=1e-5)


def test_the_tail_is_computed_before_rounding_to_half():
    stored = compress(noise(50, 4000, scale=0.5), k=1000)
    exact = noise(50, 4000, scale=0.5).double().softmax(-1)
    tail = exact.scatter(1, stored["ids"].long(), 0.0).sum(-1)
    rounded = 1 - stored["log_probs"].double().exp().sum(-1)
    error = (stored["log_tail"].double().exp() - tail).abs().max()
    assert error < 2e-6
    assert (rounded - tail).abs().max() > 10 * error


@pytest.mark.parametrize(
    "logits",
    [
        torch.tensor([[-math.inf, 2.0, -math.inf, -math.inf, -math.inf]]),
        torch.tensor([[0.0, 1000.0, 0.0, 0.0, 0.0]]),
        torch.tensor([[0.0, 60000.0, 0.0, 0.0, 0.0]], dtype=torch.float64),
    ],
)
def test_a_certain_token_has_all_mass_and_no_number_is_nan(logits):
    stored = compress(logits, k=3)
    assert stored["ids"][0, 0] == 1
    assert stored["log_probs"][0].exp().tolist() == [1.0, 0.0, 0.0]
    assert not any(tensor.float().isnan().any() for tensor in stored.values())
    assert stored["log_tail"].item() == pytest.approx(math.log(1e-12))


def test_excluded_tokens_leave_the_rest_as_it_is():
    stored = compress(torch.tensor([[math.log(3.0), -math.inf, 0.0, -math.inf]]), k=3)
    assert stored["ids"][0, :2].tolist() == [0, 2]
    assert stored["log_probs"][0].exp().tolist() == pytest.approx([0.75, 0.25, 0.0], abs=1e-3)


def test_ids_take_16_bits_below_65537_tokens_and_32_above():
    for vocabulary, dtype in ((65_536, torch.uint16), (65_537, torch.int32)):
        logits = torch.zeros(1, vocabulary)
        logits[0, -1] = 5.0
        stored = compress(logits, k=1)
        assert stored["ids"].dtype is dtype
        assert stored["ids"].item() == vocabulary - 1


@pytest.mark.parametrize("vocabulary", [300, 70_000])
def test_every_row_reads_back_what_was_computed(tmp_path, vocabulary):
    shards = {
        "shard-00001.safetensors": [([9, 8, 7], 1)],
        "shard-00000.safetensors": [([1, 2, 3, 4, 5], 2), ([6, 299], 1), ([3, 3, 3, 3], 3)],
    }
    stored = {}
    for seed, (name, rows) in enumerate(shards.items()):
        stored[name] = compress(noise(sum(len(t) - s for t, s in rows), vocabulary, seed=seed), k=7)
        write_shard(tmp_path / name, rows, stored[name])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(shards)
    cache = LogitCache(tmp_path)
    assert (len(cache), cache.lengths, cache.starts) == (4, [5, 2, 4, 3], [2, 1, 3, 1])
    assert cache.positions == 3 + 1 + 1 + 2
    number = 0
    for name in sorted(shards):
        target = 0
        for tokens, start in shards[name]:
            row = cache[number]
            part = slice(target, target + len(tokens) - start)
            assert (row.tokens.tolist(), row.start) == (tokens, start)
            assert torch.equal(row.targets.ids, stored[name]["ids"].long()[part])
            assert torch.equal(row.targets.log_probs, stored[name]["log_probs"].float()[part])
            assert torch.equal(row.targets.log_tail, stored[name]["log_tail"][part])
            assert row.tokens.dtype is row.targets.ids.dtype is torch.int64
            number, target = number + 1, part.stop


@pytest.mark.parametrize("positions", [2, 4])
def test_a_shard_needs_one_target_for_each_response_token(tmp_path, positions):
    with pytest.raises(ValueError, match="one target for each response token"):
        write_shard(tmp_path / "shard-00000.safetensors", [([1, 2, 3, 4], 1)], compress(noise(positions, 20), k=4))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("vocabulary", "k"), [(49_152, 128), (70_000, 64), (100, 1024)])
def test_the_size_that_is_promised_is_the_size_on_disk(tmp_path, vocabulary, k):
    rows = [(list(range(101)), 1)] * 5
    write_shard(tmp_path / "shard-00000.safetensors", rows, compress(noise(500, vocabulary), k))
    size = (tmp_path / "shard-00000.safetensors").stat().st_size
    assert size / 500 == pytest.approx(bytes_per_position(k, vocabulary), rel=0.05)


def test_bytes_by_hand():
    assert bytes_per_position(128, 49_152) == 128 * (2 + 2) + 4 + 4 + 4
    assert bytes_per_position(128, 151_936) == 128 * (4 + 2) + 4 + 4 + 4
    assert bytes_per_position(128, 100) == 100 * (2 + 2) + 4 + 4 + 4
