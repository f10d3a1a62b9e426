"""k by position: the least that reaches the mass, what it says is what codec topk says, and rows read back from shards."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.fidelity import known_mass, overlap
from data.logit_cache import LogitCache
from data.shards import DamagedShardError, Seal, write_shard
from data.targets import concatenate
from data.topk import TopK
from data.topmass import TopMass
from tests.data.test_codecs import BITS, HALF, SHAPES, VOCABULARIES, made, noise


def test_counts_by_hand():
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]])
    stored = TopMass(3, 0.7).encode(p.log(), 0)
    assert stored["counts"].tolist() == [2, 1, 3, 1]
    torch.testing.assert_close(stored["log_tail"].exp(), torch.tensor([0.25, 0.03, 0.25, 0.0]), atol=1e-6, rtol=0)
    targets = TopMass(3, 0.7).decode(stored, 4)
    assert targets.ids[:2].tolist() == [[0, 1, 0], [0, 0, 0]]
    torch.testing.assert_close(
        targets.log_probs[:2].exp(), torch.tensor([[0.5, 0.25, 0.0], [0.97, 0.0, 0.0]]), atol=1e-3, rtol=0
    )
    assert (targets.weights, targets.certain) == (None, 3)


@settings(deadline=None, max_examples=25)
@given(
    VOCABULARIES, st.integers(1, 60), st.sampled_from([0.3, 0.9, 0.999]), st.integers(0, 5), SHAPES, st.integers(0, 99), BITS
)
def test_each_position_keeps_the_fewest_ids_that_reach_the_mass(vocabulary, k, mass, m, shape, seed, bits):
    logits = made(shape, vocabulary, seed)
    codec = TopMass(k, mass, m, seed, bits)
    stored = codec.encode(logits, key=5)
    targets = codec.decode(stored, vocabulary)
    best = logits.double().softmax(-1).sort(descending=True).values[:, :k]
    counts = stored["counts"].long()
    reached = best.cumsum(-1).gather(1, counts[:, None] - 1)[:, 0]
    before = torch.where(counts > 1, reached - best.gather(1, counts[:, None] - 1)[:, 0], 0.0)
    assert bool(((reached >= mass - 1e-5) | (counts == min(k, vocabulary))).all())
    assert bool((before < mass + 1e-5).all())
    torch.testing.assert_close(stored["log_tail"].double().exp(), 1 - reached, atol=1e-5, rtol=1e-5)
    lengths = codec.flat_lengths(stored["counts"], vocabulary)
    assert {name: len(stored[name]) for name in stored if name.startswith("flat_")} == {n: c for n, c in lengths.items() if c}
    room = sum(tensor.nbytes for tensor in stored.values())
    assert room <= 3 * codec.bytes_per_position(vocabulary, 0)
    known, where = known_mass(targets, vocabulary)
    exact = logits.double().softmax(-1)
    error = {16: 20 * HALF, 8: 0.25}[bits] * exact + 1e-4
    assert bool(((known - exact).abs() <= error)[where & (known > 0)].all())
    assert bool((where.sum(-1) >= counts).all())
    assert targets.ids.shape[1] == targets.certain + m


@pytest.mark.parametrize("m", [0, 6])
def test_with_the_whole_mass_it_says_what_topk_says(m):
    logits = noise(40, 90, 2.0)
    ours, theirs = (codec.decode(codec.encode(logits, 7), 90) for codec in (TopMass(12, 0.999999, m, 3), TopK(12, m, 3)))
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=4e-3, rtol=0)
    assert ours.certain == theirs.certain
    if m:
        torch.testing.assert_close(ours.weights, theirs.weights, atol=0, rtol=1e-2)


def test_overlap_from_drawn_ids_has_no_bias():
    log_p, log_q = noise(4000, 300).log_softmax(-1), noise(4000, 300, seed=1).log_softmax(-1)
    codec = TopMass(16, 0.8, 4, bits=8)
    error = overlap(codec.decode(codec.encode(log_p, 0), 300), log_q) - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    assert abs(float(error.mean() / (error.std() / len(error) ** 0.5))) < 4
    assert abs(float(error.mean())) < 5e-3


ROWS = [[([1, 2, 3, 4, 5], 2), ([6, 299], 1), ([3, 3, 3, 3], 3)], [([9, 8, 7], 1)]]


def shards(folder, codec, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Write ROWS; gives what was encoded of each row."""
    rows = []
    for number, group in enumerate(ROWS):
        parts = [codec.encode(noise(len(t) - s, vocabulary, 4.0, 10 * number + i), i) for i, (t, s) in enumerate(group)]
        stored = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        write_shard(folder, group, stored, Seal("c0", folder.name, number, len(ROWS), codec, vocabulary))
        rows += parts
    return rows


@pytest.mark.parametrize("vocabulary", [300, 70_000])
@pytest.mark.parametrize("m", [0, 3])
def test_rows_read_back_and_lie_in_one_batch(tmp_path, vocabulary, m):
    codec = TopMass(20, 0.6, m, bits=8)
    encoded = shards(tmp_path / "train", codec, vocabulary)
    cache = LogitCache(tmp_path / "train", "c0")
    found = [cache[index].targets for index in range(len(cache))]
    for targets, part in zip(found, encoded, strict=True):
        wanted = codec.decode(part, vocabulary)
        assert torch.equal(targets.ids, wanted.ids)
        assert torch.equal(targets.log_probs, wanted.log_probs)
    assert len({targets.certain for targets in found}) > 1  # or nothing is widened
    both = concatenate(found)
    assert both.ids.shape == both.log_probs.shape == (7, both.certain + m)
    log_q = noise(7, vocabulary, 4.0, 99).log_softmax(-1)
    alone = [overlap(targets, part) for targets, part in zip(found, log_q.split([len(t.ids) for t in found]), strict=True)]
    torch.testing.assert_close(overlap(both, log_q), torch.cat(alone))


def test_counts_are_looked_at_before_they_are_used(tmp_path):
    codec = TopMass(20, 0.6)
    shards(tmp_path / "train", codec, 300)
    path = tmp_path / "train" / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little")
    place = 8 + header + json.loads(content[8 : 8 + header])["counts"]["data_offsets"][0]
    content[place] ^= 2
    path.write_bytes(content)
    with pytest.raises(DamagedShardError, match=r"shard-00000\.safetensors: this shard is damaged \(its index differs"):
        LogitCache(tmp_path / "train", "c0")


def test_excluded_ids_and_certainty_leave_no_nan():
    logits = torch.tensor([[0.0, -math.inf, -math.inf], [0.0, 0.0, -math.inf]])
    targets = TopMass(3, 0.9, 2).decode(TopMass(3, 0.9, 2).encode(logits, 0), 3)
    assert not any(tensor.isnan().any() for tensor in (targets.log_probs, targets.weights))
    torch.testing.assert_close(targets.log_probs[:, :2].exp(), torch.tensor([[1.0, 0.0], [0.5, 0.5]]), atol=1e-3, rtol=0)
    assert bool((targets.weights[:, -2:] == 0).all())
