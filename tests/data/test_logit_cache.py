"""What is stored of a distribution is what float64 says of it, a row reads back as it was written, damage is refused."""

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.artifact import remove_partial
from data.codec import size
from data.dense import Dense
from data.hidden import HEAD, Hidden
from data.logit_cache import LogitCache, write_head
from data.sampled import Sampled
from data.shards import DamagedShardError, Seal, fault, write_shard
from data.topk import TopK

REPOSITORY = Path(__file__).parents[2]
ROWS = [[([1, 2, 3, 4, 5], 2), ([6, 299], 1), ([3, 3, 3, 3], 3)], [([9, 8, 7], 1)], [([5, 6], 1)]]


def noise(positions: int, vocabulary: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def encode(logits: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    return TopK(k).encode(logits, key=0)


def written(
    folder: Path, codec=None, vocabulary: int = 300, cache: str = "c0", width: int = 300
) -> list[dict[str, torch.Tensor]]:
    """Write ROWS into ``folder``; gives what was stored by shard."""
    codec = codec or TopK(7)
    stored = []
    for number, rows in enumerate(ROWS):
        given = noise(sum(len(t) - s for t, s in rows), width, seed=number)
        stored.append(codec.encode(given, key=number))
        write_shard(folder, rows, stored[-1], Seal(cache, folder.name, number, len(ROWS), codec, vocabulary))
    return stored


def test_a_distribution_by_hand():
    stored = encode(torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log() + 3.0, k=2)
    assert stored["ids"].tolist() == [[1, 3]]
    torch.testing.assert_close(stored["log_probs"].float(), torch.tensor([[0.5, 0.25]]).log(), atol=1e-3, rtol=0)
    torch.testing.assert_close(stored["entropy"], torch.tensor([1.75 * math.log(2)]))
    torch.testing.assert_close(stored["log_tail"], torch.tensor([0.25]).log())


def test_the_tail_is_computed_before_rounding_to_half():
    stored = encode(noise(50, 4000, scale=0.5), k=1000)
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
    stored = encode(logits, k=3)
    assert stored["ids"][0, 0] == 1
    assert stored["log_probs"][0].exp().tolist() == [1.0, 0.0, 0.0]
    assert not any(tensor.float().isnan().any() for tensor in stored.values())
    assert stored["log_tail"].item() == pytest.approx(math.log(1e-12))


def test_excluded_tokens_leave_the_rest_as_it_is():
    stored = encode(torch.tensor([[math.log(3.0), -math.inf, 0.0, -math.inf]]), k=3)
    assert stored["ids"][0, :2].tolist() == [0, 2]
    assert stored["log_probs"][0].exp().tolist() == pytest.approx([0.75, 0.25, 0.0], abs=1e-3)


@pytest.mark.parametrize("codec", [TopK(7), TopK(7, 3), Sampled(5), Sampled(5, 2.0), Dense()], ids=str)
@pytest.mark.parametrize("vocabulary", [300, 70_000])
def test_every_row_reads_back_what_was_computed(tmp_path, codec, vocabulary):
    stored = written(tmp_path / "train", codec, vocabulary, width=vocabulary)
    cache = LogitCache(tmp_path / "train", "c0")
    assert (len(cache), cache.lengths, cache.starts) == (5, [5, 2, 4, 3, 2], [2, 1, 3, 1, 1])
    assert cache.positions == 3 + 1 + 1 + 2 + 1
    number = 0
    for rows, tensors in zip(ROWS, stored, strict=True):
        target = 0
        for tokens, start in rows:
            row = cache[number]
            part = {name: tensor[target : target + len(tokens) - start] for name, tensor in tensors.items()}
            wanted = codec.decode(part, vocabulary)
            assert (row.tokens.tolist(), row.start) == (tokens, start)
            for name, tensor in vars(wanted).items():
                found = getattr(row.targets, name)
                assert torch.equal(found, tensor) if isinstance(tensor, torch.Tensor) else found == tensor
            number, target = number + 1, target + len(tokens) - start


@pytest.mark.parametrize("bias", [None, noise(40, 1)[:, 0]])
def test_hidden_states_are_read_through_the_one_head(tmp_path, bias):
    head = noise(40, 16, 1.0)
    written(tmp_path / "train", Hidden(16), 40, width=16)
    write_head(tmp_path, "c0", head, bias)
    found = LogitCache(tmp_path / "train", "c0")[3].targets.log_probs
    states = noise(2, 16, seed=1)
    wanted = (states @ head.T + (0 if bias is None else bias)).log_softmax(-1)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=0)


@pytest.mark.parametrize("positions", [2, 4])
def test_a_shard_needs_one_target_for_each_response_token(tmp_path, positions):
    seal = Seal("c0", "train", 0, 1, TopK(4), 20)
    with pytest.raises(ValueError, match="one target for each response token"):
        write_shard(tmp_path, [([1, 2, 3, 4], 1)], encode(noise(positions, 20), 4), seal)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("codec", "vocabulary", "width"),
    [(TopK(128), 5000, 5000), (TopK(64, 8), 70_000, 70_000), (Sampled(64), 100, 100), (Hidden(8), 100, 576)],
    ids=str,
)
def test_the_size_that_is_promised_is_the_size_on_disk(tmp_path, codec, vocabulary, width):
    rows = [(list(range(101)), 1)] * 2
    write_shard(tmp_path, rows, codec.encode(noise(200, width), 0), Seal("c0", "train", 0, 1, codec, vocabulary))
    promised = size(codec, vocabulary, width, positions=200, tokens=202, rows=2, shards=1)
    assert (tmp_path / "shard-00000.safetensors").stat().st_size == pytest.approx(promised, rel=0.02)


def read_all(folder: Path, cache: str = "c0") -> None:
    opened = LogitCache(folder, cache)
    for index in range(len(opened)):
        opened[index]


def test_every_flipped_bit_is_noticed(tmp_path):
    written(tmp_path / "train")
    path = tmp_path / "train" / "shard-00001.safetensors"
    whole = path.read_bytes()
    choose = random.Random(0)
    places = [*range(16), *choose.sample(range(len(whole)), 300)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DamagedShardError, match=r"shard-00001\.safetensors: this shard is "):
            read_all(tmp_path / "train")
    path.write_bytes(whole)
    read_all(tmp_path / "train")


@pytest.mark.parametrize("left", [0, 7, 100, 700, -1])
def test_a_shard_that_was_cut_off_is_refused(tmp_path, left):
    written(tmp_path / "train")
    path = tmp_path / "train" / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DamagedShardError, match=r"shard-00001\.safetensors: this shard is damaged \("):
        LogitCache(tmp_path / "train", "c0")


def test_a_shard_from_elsewhere_is_refused_with_what_differs(tmp_path):
    for name, cache in (("train", "c0"), ("other", "c1"), ("validation-1", "c0")):
        written(tmp_path / name, cache=cache)
    shards = [tmp_path / name / "shard-00001.safetensors" for name in ("train", "other", "validation-1")]
    mine = shards[0].read_bytes()
    for source, message in (
        (shards[1], "its cache is c1, not c0"),
        (shards[2], "its part is validation-1, not train"),
        (tmp_path / "train" / "shard-00002.safetensors", "its number is 2, not 1"),
    ):
        shards[0].write_bytes(source.read_bytes())
        with pytest.raises(DamagedShardError, match=rf"train/shard-00001\.safetensors: .* from elsewhere: {message}"):
            LogitCache(tmp_path / "train", "c0")
    shards[0].write_bytes(mine)
    written(tmp_path / "train2" / "train", codec=TopK(5))
    shards[0].write_bytes((tmp_path / "train2" / "train" / "shard-00001.safetensors").read_bytes())
    with pytest.raises(DamagedShardError, match="its codec is"):
        LogitCache(tmp_path / "train", "c0")


def test_a_file_that_no_stage_sealed_is_refused(tmp_path):
    written(tmp_path / "train")
    path = tmp_path / "train" / "shard-00001.safetensors"
    save_file(load_file(path), path)
    with pytest.raises(DamagedShardError, match="its cache is None, not c0"):
        LogitCache(tmp_path / "train", "c0")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_missing_shard_is_named(tmp_path, number):
    written(tmp_path / "train")
    (tmp_path / "train" / f"shard-0000{number}.safetensors").unlink()
    with pytest.raises(DamagedShardError, match=rf"shard-0000{number}\.safetensors: this shard is missing"):
        LogitCache(tmp_path / "train", "c0")


def test_a_part_without_rows_is_empty_but_one_without_its_shards_is_refused(tmp_path):
    assert len(LogitCache(tmp_path / "train", "c0")) == 0
    (tmp_path / "train").mkdir()
    with pytest.raises(DamagedShardError, match="its shards are missing"):
        LogitCache(tmp_path / "train", "c0")


@pytest.mark.parametrize("damage", ["missing", "other", "flipped"])
def test_a_damaged_head_is_refused(tmp_path, damage):
    written(tmp_path / "train", Hidden(16), 40, width=16)
    path = tmp_path / HEAD
    if damage != "missing":
        write_head(tmp_path, "c1" if damage == "other" else "c0", noise(40, 16), None)
    if damage == "flipped":
        content = bytearray(path.read_bytes())
        content[-5] ^= 4
        path.write_bytes(content)
    with pytest.raises(DamagedShardError, match=r"head\.safetensors: this shard is"):
        read_all(tmp_path / "train")


WRITER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from data.artifact import remove_partial
from data.shards import Seal, fault, write_shard
from data.topk import TopK

SHARDS, CODEC = 40, TopK(6, 4, seed=3)

def write(folder):
    remove_partial(folder)
    for number in range(SHARDS):
        seal = Seal("c0", "train", number, SHARDS, CODEC, 500)
        if fault(folder / seal.file, seal.metadata):
            logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(number))
            write_shard(folder, [([1] * 31, 1)], CODEC.encode(logits, number), seal)

def digest(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}

root, wanted = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
began = time.perf_counter()
(root / "calm").mkdir()
write(root / "calm")
longest = time.perf_counter() - began
calm, kills, finished, partial, choose = digest(root / "calm"), 0, 0, 0, random.Random(0)
assert len(calm) == SHARDS
while kills < wanted or not finished:
    folder = root / f"killed-{finished}"
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        write(folder)
        os._exit(0)
    if kills < wanted:
        time.sleep(choose.random() * longest / 3)
        os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] == signal.SIGKILL:
        kills += 1
        partial += any(name.endswith(".partial") for name in digest(folder))
    else:
        assert digest(folder) == calm, f"bytes differ after {kills} kills"
        finished += 1
print(kills, finished, partial)
"""


def test_thirty_and_more_kills_at_random_moments_leave_the_bytes_of_an_undisturbed_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), "40"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kills, finished, partial = map(int, done.stdout.split())
    assert kills >= 40
    assert finished >= 1
    assert partial >= 1  # some kills struck in the middle of a write


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    written(tmp_path / "train")
    whole = sorted(tmp_path.rglob("shard-*"))
    (tmp_path / "train" / ".shard-00001.safetensors.99.partial").write_bytes(b"half")
    read_all(tmp_path / "train")
    remove_partial(tmp_path)
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == whole
    assert fault(whole[0], {"cache": "c0"}) is None
