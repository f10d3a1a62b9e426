"""States come back by request, bit for bit."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.states import States, states_file, write_states


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
    with pytest.raises(KeyError):
        read.of(10**6)


def test_the_file_lies_beside_its_shard():
    assert states_file(Path("a/shard-00012.parquet")) == Path("a/states-00012.safetensors")
