"""States come back by request, bit for bit; what is damaged, missing or from elsewhere is named and never read."""

import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from data.artifact import remove_partial
from data.states import DamagedStatesError, States, states_fault, states_file, write_states


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_states_survive_by_key(tmp_path_factory, shards, dtype):
    folder = tmp_path_factory.mktemp("states")
    wanted = {}
    for number, lengths in enumerate(shards):
        keys = [100 * number + 7 * place for place in range(len(lengths))]
        states = [torch.randn(length, 5).to(dtype) for length in lengths]
        write_states(states_file(folder / f"shard-{number:05d}.parquet"), keys, states)
        wanted |= dict(zip(keys, states, strict=True))
    read = States(folder)
    for key, states in wanted.items():
        assert len(read.of(key)) == len(states)
        if len(states):
            assert read.of(key).dtype is dtype
            assert torch.equal(read.of(key), states)
    missing = rf"^{re.escape(str(folder))}: the states of the response to request 1000000 are missing$"
    with pytest.raises(DamagedStatesError, match=missing):
        read.of(10**6)


def test_the_file_lies_beside_its_shard():
    assert states_file(Path("a/shard-00012.parquet")) == Path("a/states-00012.safetensors")


@pytest.fixture
def path(tmp_path):
    """A file of states of two responses."""
    path = tmp_path / "run" / "states-00000.safetensors"
    write_states(path, [3, 4], [torch.ones(2, 5), torch.zeros(3, 5)])
    assert states_fault(path) is None
    return path


def test_a_flipped_bit_of_a_state_is_seen_before_the_state_is_used(path):
    content = bytearray(path.read_bytes())
    content[-70] ^= 16
    path.write_bytes(content)
    why = f"{path}: this shard is damaged (its content differs from its checksum)"
    read = States(path.parent)
    for _ in range(2):  # a file that failed once is not held to be checked
        with pytest.raises(DamagedStatesError, match=re.escape(why)):
            read.of(3)
    assert states_fault(path) == why


@pytest.mark.parametrize("damage", ["cut", "keys", "lengths", "renamed", "moved", "unsealed"])
def test_a_damaged_or_strange_file_is_named_at_once(path, damage):
    tensors, reason = load_file(path), "this shard is damaged"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage in ("keys", "lengths"):
        content, numbers = bytearray(path.read_bytes()), tensors[damage].numpy().tobytes()
        content[content.index(numbers)] ^= 1
        path.write_bytes(content)
        reason = r"this shard is damaged \(its index differs from its checksum\)"
    elif damage == "renamed":
        path = path.rename(path.with_name("states-00001.safetensors"))
        reason = "this shard is from elsewhere: its file is states-00000.safetensors, not states-00001.safetensors"
    elif damage == "moved":
        path = Path(shutil.copytree(path.parent, path.parent.with_name("other"))) / path.name
        reason = "this shard is from elsewhere: its responses is run, not other"
    else:
        save_file(tensors, path)
        reason = "this shard is from elsewhere: its responses is None, not run"
    with pytest.raises(DamagedStatesError, match=f"^{re.escape(str(path))}: {reason}"):
        States(path.parent)
    assert states_fault(path)


def test_a_write_that_is_killed_leaves_only_what_the_next_run_removes(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills it in the middle of the file
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            write_states(tmp_path / "states-00000.safetensors", [1], [torch.zeros(100, 8)])
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGXFSZ
    assert list(tmp_path.iterdir())
    remove_partial(tmp_path)
    assert not list(tmp_path.iterdir())
