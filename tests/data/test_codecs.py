"""What a codec stores reads back as float64 says, for any vocabulary, and drawn ids estimate every sum without bias."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import draws, packing, rounding
from data.codec import describe, described, size
from data.dense import Dense
from data.fidelity import known_mass, measures, overlap, summary
from data.hidden import Hidden, through_head
from data.sampled import Sampled
from data.targets import DenseTargets, SparseTargets, concatenate
from data.topk import TopK

HALF = 2.0**-11  # relative rounding error of half precision
VOCABULARIES = st.sampled_from([16, 17, 1000, 65_536, 65_537, 131_073, 300_000])
few = settings(deadline=None, max_examples=25)


def noise(positions: int, vocabulary: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def made(shape: str, vocabulary: int, seed: int) -> torch.Tensor:
    """Logits (3, V) of the named kind."""
    logits = noise(3, vocabulary, seed=seed)
    if shape == "one-hot":
        return torch.full_like(logits, -math.inf).scatter(1, logits.argmax(-1, keepdim=True), 0.0)
    if shape == "uniform":
        return torch.zeros_like(logits)
    if shape == "excluded":
        return logits.masked_fill(torch.arange(vocabulary) % 3 == 1, -math.inf)
    return logits.bfloat16() if shape == "bfloat16" else logits


SHAPES = st.sampled_from(["noise", "one-hot", "uniform", "excluded", "bfloat16"])
BITS = st.sampled_from([16, 8])


def coarseness(log_probs: torch.Tensor, bits: int) -> torch.Tensor:
    """The most that a stored log-probability may be off: half a step of half precision, or of the root's 254 codes."""
    if bits == 16:
        return HALF * log_probs.abs() + 2e-5
    half_step = (25 * log_probs.abs()).sqrt() / 254 + 25 / (4 * 254**2)
    return torch.where(log_probs < -25, log_probs.abs() - 25, half_step) + 2e-5


@few
@given(
    VOCABULARIES,
    st.one_of(st.just(1), st.integers(1, 60), st.just(1 << 20)),  # the last: all ids
    st.integers(0, 9),
    SHAPES,
    st.integers(0, 99),
    BITS,
)
@example(300_000, 1 << 20, 3, "noise", 0, 16)
@example(131_073, 131_073, 3, "excluded", 0, 8)
def test_topk_keeps_p_of_its_ids(vocabulary, k, m, shape, seed, bits):
    logits = made(shape, vocabulary, seed)
    codec = TopK(k, m, seed, bits)
    stored = codec.encode(logits, key=5)
    targets = codec.decode(stored, vocabulary)
    assert sum(tensor[0].nbytes for tensor in stored.values()) == codec.bytes_per_position(vocabulary, 0)
    exact = logits.double().log_softmax(-1)
    kept = exact.gather(1, targets.ids)
    counted = torch.isfinite(targets.log_probs)
    error = (targets.log_probs.double() - kept).abs()[counted]
    assert bool((error <= coarseness(kept, bits)[counted]).all())
    best = targets.ids[:, : min(k, vocabulary)]
    assert torch.equal(logits.float().gather(1, best), logits.float().sort(descending=True).values[:, : min(k, vocabulary)])
    outside = exact.exp().scatter(1, best, 0.0)
    assert not targets.log_probs.isnan().any()
    entropy = -torch.where(exact > -math.inf, exact.exp() * exact, 0.0).sum(-1)
    torch.testing.assert_close(stored["entropy"].double(), entropy, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stored["log_tail"].double().exp(), outside.sum(-1), atol=1e-5, rtol=1e-5)
    if targets.weights is not None:
        assert bool(torch.isfinite(targets.weights).all())
        drawn, weights = targets.ids[:, -m:], targets.weights[:, -m:]
        assert bool(((outside.gather(1, drawn) > 0) | (weights == 0)).all())
        assert torch.equal(targets.weights[:, :-m], torch.ones_like(targets.weights[:, :-m]))


@few
@given(VOCABULARIES, st.integers(1, 40), st.sampled_from([0.5, 1.0, 2.0]), SHAPES, st.integers(0, 99), BITS)
def test_sampled_keeps_p_and_the_weight_of_its_ids(vocabulary, m, temperature, shape, seed, bits):
    logits = made(shape, vocabulary, seed)
    codec = Sampled(m, temperature, seed, bits)
    stored = codec.encode(logits, key=5)
    targets = codec.decode(stored, vocabulary)
    assert sum(tensor[0].nbytes for tensor in stored.values()) == codec.bytes_per_position(vocabulary, 0)
    exact = logits.double().log_softmax(-1)
    kept = exact.gather(1, targets.ids)
    assert bool(((targets.log_probs.double() - kept).abs() <= coarseness(kept, bits)).all())
    chances = (exact / temperature).log_softmax(-1).gather(1, targets.ids).exp()
    off = (coarseness(kept, bits) / temperature).exp() - 1
    assert bool(((targets.weights.double() * m * chances - 1).abs() <= off + 1e-3).all())


def test_eight_bits_are_finest_where_p_is_large_and_keep_excluded_ids():
    log_probs = torch.tensor([0.0, 0.95, 0.3, math.exp(-12), 1e-20, 0.0]).log()
    log_probs[0] = 0.0
    found = rounding.restored(rounding.rounded(log_probs, 8))
    assert found[0] == 0
    assert found[5] == -math.inf
    assert found[4] == rounding.SMALLEST
    off = (found[1:4] - log_probs[1:4]).abs()
    assert bool((off <= torch.tensor([0.005, 0.012, 0.07])).all())


def test_eight_bits_err_in_both_directions_alike():
    log_probs = -torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 8
    p, found = log_probs.exp(), rounding.restored(rounding.rounded(log_probs, 8)).exp()
    assert abs(float((found / p).mean()) - 1) < 5e-4


@few
@given(VOCABULARIES, SHAPES, st.integers(0, 99))
def test_dense_keeps_every_log_probability(vocabulary, shape, seed):
    logits = made(shape, vocabulary, seed)
    stored = Dense().encode(logits, key=5)
    assert sum(tensor[0].nbytes for tensor in stored.values()) == Dense().bytes_per_position(vocabulary, 0)
    found, exact = Dense().decode(stored, vocabulary).log_probs.double(), logits.double().log_softmax(-1)
    assert torch.equal(found.isfinite(), exact.isfinite())
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-6)  # the sum of 300,000 numbers in float32


def states(shape: str, width: int, seed: int) -> torch.Tensor:
    """Hidden states (4, d) of the named kind."""
    hidden = noise(4, width, seed=seed)
    if shape == "outlying":
        hidden[:, seed % width] *= 1000
    elif shape == "largest":
        hidden = hidden.sign() * torch.finfo(torch.float16).max
    elif shape == "tiny":
        hidden = hidden * 1e-7
    elif shape == "zero":
        hidden = torch.zeros_like(hidden)
    return hidden.bfloat16() if shape == "bfloat16" else hidden


@few
@given(
    st.integers(1, 300),
    st.sampled_from(["noise", "outlying", "largest", "tiny", "zero", "bfloat16"]),
    st.integers(0, 99),
    BITS,
)
def test_hidden_keeps_every_number_to_half_a_step(width, shape, seed, bits):
    """A step is that of half precision in 16 bits, and in 8 bits up to 2^⅛ times a 127th of the largest of 9 numbers."""
    hidden = states(shape, width, seed)
    codec = Hidden(bits)
    stored = codec.encode(hidden, key=5)
    assert sum(tensor[0].nbytes for tensor in stored.values()) == codec.bytes_per_position(0, width)
    found, exact = codec.decode_hidden(stored).double(), hidden.double()
    if bits == 16:
        allowed = HALF * exact.abs() + 2.0**-25
    else:  # no scale is below the least one
        largest = torch.stack([exact[:, i - i % 9 : i - i % 9 + 9].abs().amax(-1) for i in range(width)], 1)
        allowed = 0.5001 * 2 ** (1 / 8) * (largest / 127).clamp(min=2.0**-22.75)
    assert bool(((found - exact).abs() <= allowed).all())


@pytest.mark.parametrize(("bits", "worst"), [(16, 1e-5), (8, 1e-3)])
@pytest.mark.parametrize("width", [48, 64, 130])
def test_hidden_gives_the_distributions_back(bits, worst, width):
    hidden, head = noise(300, width, 1.0), noise(500, width, 2 / width**0.5, seed=1)
    hidden[:, 3] *= 30  # an outlying dimension
    codec = Hidden(bits)
    stored = codec.encode(hidden.bfloat16() if bits == 16 else hidden, 0)
    assert sum(tensor[0].nbytes for tensor in stored.values()) == codec.bytes_per_position(500, width)
    wanted = ((hidden.bfloat16().float() if bits == 16 else hidden) @ head.T).log_softmax(-1)
    found = through_head(codec.decode_hidden(stored), head, None).log_probs
    divergence = (wanted.double().exp() * (wanted.double() - found.double())).sum(-1)
    assert divergence.mean() < worst * (10 if bits == 8 else 1)
    assert torch.equal(through_head(codec.decode_hidden(stored), head, torch.zeros(500)).log_probs, found)


def test_hidden_states_of_zero_and_beyond_half_precision():
    assert Hidden(8).decode_hidden(Hidden(8).encode(torch.zeros(2, 70), 0)).tolist() == torch.zeros(2, 70).tolist()
    for bad in (1e6, math.nan, math.inf):
        with pytest.raises(ValueError, match="does not fit into half precision"):
            Hidden(16).encode(torch.tensor([[0.0, bad]]), 0)


@few
@given(st.integers(2, 400_000), st.integers(1, 30), st.integers(0, 99))
def test_packed_ids_come_back(vocabulary, count, seed):
    ids = torch.randint(vocabulary, (4, count), generator=torch.Generator().manual_seed(seed))
    ids[0, 0] = vocabulary - 1
    stored = packing.pack(ids, vocabulary)
    assert torch.equal(packing.unpack(stored, vocabulary), ids)
    assert sum(tensor[0].nbytes for tensor in stored.values()) == packing.bytes_of_ids(count, vocabulary)


def test_ids_take_16_bits_17_and_18_by_hand():
    found = [packing.bytes_of_ids(128, vocabulary) for vocabulary in (65_536, 131_072, 151_936, 262_144)]
    assert found == [256, 256 + 16, 256 + 32, 256 + 32]


@pytest.mark.parametrize("codec", [TopK(4, 2), Sampled(4), Hidden(8), Dense()], ids=str)
def test_encoding_leaves_what_it_is_given_as_it_was(codec):
    given = noise(5, 96)
    before = given.clone()
    codec.encode(given, 0)
    assert torch.equal(given, before)


P, Q = torch.tensor([[0.45, 0.25, 0.15, 0.1, 0.05]]).log(), torch.tensor([[0.1, 0.4, 0.05, 0.15, 0.3]]).log()
SUMS = {
    "overlap": lambda p, q: torch.minimum(p, q),
    "total variation": lambda p, q: (p - q).clamp(min=0),
    "forward KL": lambda p, q: p * (p / q).log(),
}


def expected(codec, chances, value, monkeypatch) -> float:
    """The mean of ``value(targets)`` over every draw of one id, through encode and decode."""
    total = 0.0
    for place, chance in enumerate(chances):
        if chance == 0:
            continue
        monkeypatch.setattr(draws, "draw", lambda weights, uniform, place=place: torch.tensor([[place]]))
        total += chance * value(codec.decode(codec.encode(P, 0), 5))
    return total


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("codec", [TopK(2, 1), Sampled(1), Sampled(1, 2.0)], ids=str)
def test_the_mean_over_all_draws_is_the_sum_over_all_ids(name, codec, monkeypatch):
    p, q = P.exp(), Q.exp()
    outside = p.scatter(1, P.topk(2).indices, 0.0)[0]
    chances = (outside / outside.sum()) if isinstance(codec, TopK) else (P[0] / codec.temperature).softmax(-1)

    def honest(targets) -> float:
        return float((targets.weights * SUMS[name](targets.log_probs.exp(), q.gather(1, targets.ids))).sum())

    def counted(targets) -> float:
        """The planted fault: weight times p, which is a count, in the place of p."""
        plugged = targets.weights * targets.log_probs.exp()
        return float(SUMS[name](plugged, q.gather(1, targets.ids)).sum())

    exact = float(SUMS[name](p, q).sum())
    assert expected(codec, chances.tolist(), honest, monkeypatch) == pytest.approx(exact, abs=2e-3)
    assert expected(codec, chances.tolist(), counted, monkeypatch) != pytest.approx(exact, abs=2e-2)


@pytest.mark.parametrize("codec", [TopK(8, 4), TopK(8, 4, bits=8), Sampled(16), Sampled(16, bits=8), Sampled(16, 1.5)], ids=str)
def test_overlap_of_many_positions_passes_a_z_test_that_counts_fail(codec):
    log_p, log_q = noise(4000, 300).log_softmax(-1), noise(4000, 300, seed=1).log_softmax(-1)
    targets = codec.decode(codec.encode(log_p, 0), 300)
    dense = torch.minimum(log_p.exp(), log_q.exp()).sum(-1).double()

    def z(estimate: torch.Tensor) -> float:
        error = estimate.double() - dense
        return float(error.mean() / (error.std() / len(error) ** 0.5))

    plugged = torch.minimum(targets.weights * targets.log_probs.exp(), log_q.exp().gather(1, targets.ids)).sum(-1)
    assert abs(z(overlap(targets, log_q))) < 4
    assert abs(z(plugged)) > 8


@few
@given(st.integers(1, 30), st.integers(0, 6), st.integers(0, 99))
def test_the_interval_holds_the_dense_overlap(k, m, seed):
    log_p, log_q = noise(20, 30, seed=seed).log_softmax(-1), noise(20, 30, seed=seed + 1).log_softmax(-1)
    for codec in (TopK(k, m), Sampled(m + 1)):
        measured = measures(log_p, codec.decode(codec.encode(log_p, seed), 30), log_q)
        assert bool((measured[:, 3] <= measured[:, 1] + 1e-3).all())
        assert bool((measured[:, 4] >= measured[:, 1] - 1e-3).all())
        assert measured[:, 0].min() > -1e-3


def test_fidelity_by_hand():
    log_p = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    targets = SparseTargets(torch.tensor([[0]]), torch.tensor([[0.5]]).log(), torch.tensor([0.5]).log())
    found = summary(measures(log_p, targets, torch.tensor([[0.25, 0.25, 0.25, 0.25]]).log()))
    assert (found.positions, found.overlap, found.overlap_estimated) == (1, pytest.approx(0.75), pytest.approx(0.25))
    assert (found.overlap_lower, found.overlap_upper) == (pytest.approx(0.25), pytest.approx(0.75))
    assert (found.overlap_bias, found.overlap_standard_error) == (pytest.approx(-0.5), 0.0)
    # The three others share ½: ¼·ln(¼ / ⅙) + 2·⅛·ln(⅛ / ⅙)
    assert found.kl == pytest.approx(0.25 * math.log(1.5) + 0.25 * math.log(0.75))


def test_an_id_drawn_twice_is_known_once():
    ids, log_probs = torch.tensor([[2, 2, 0]]), torch.tensor([[0.5, 0.5, 0.25]]).double().log()
    known, where = known_mass(SparseTargets(ids, log_probs, torch.zeros(1), torch.ones(1, 3)), 4)
    torch.testing.assert_close(known, torch.tensor([[0.25, 0.0, 0.5, 0.0]]).double())
    assert where.tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("codec", [TopK(3, 2, 9, 8), Sampled(4, 0.5, 1), Hidden(8), Dense()], ids=str)
def test_a_codec_is_what_its_description_says(codec):
    assert described(describe(codec)) == codec


def test_size_by_hand():
    assert TopK(128).bytes_per_position(49_152, 576) == 128 * 4 + 8
    assert TopK(32, 14, bits=8).bytes_per_position(49_152, 576) == 46 * 3 + 8
    assert Hidden(8).bytes_per_position(49_152, 576) == 576 + 64
    assert size(Hidden(16), 10, 4, positions=5, tokens=7, rows=2, shards=1) == 5 * 8 + 7 * 4 + 2 * 8 + 1000


def test_targets_of_rows_are_put_together_and_moved():
    sparse = [codec.decode(codec.encode(noise(n, 20), 0), 20) for codec, n in ((TopK(3, 2), 2), (TopK(3, 2), 4))]
    both = concatenate(sparse).to(torch.device("cpu"))
    assert both.ids.shape == both.weights.shape == (6, 5)
    plain = concatenate([TopK(3).decode(TopK(3).encode(noise(2, 20), 0), 20)] * 2)
    assert plain.weights is None
    assert concatenate([DenseTargets(noise(2, 9)), DenseTargets(noise(1, 9))]).to(torch.device("cpu")).log_probs.shape == (3, 9)
