"""Hidden states come back from the cache beside their tokens, and positions look ahead within their own row only."""

import pytest
import torch

from data.hidden import Hidden
from data.hidden_rows import HiddenRows, collate
from data.logit_cache import LogitCache
from tests.data.test_logit_cache import ROWS, written


def test_a_row_has_its_response_and_the_states_that_were_written(tmp_path):
    codec = Hidden(16)
    stored = written(tmp_path / "train", codec, width=8)
    rows = HiddenRows(LogitCache(tmp_path / "train", "c0"))
    states = torch.cat([codec.decode_hidden(part) for part in stored])
    given = [row for shard in ROWS for row in shard]
    assert len(rows) == len(given)
    assert rows.positions == len(states)
    batch = collate([rows[place] for place in range(len(rows))])
    assert batch.tokens.tolist() == [token for tokens, start in given for token in tokens[start:]]
    assert batch.rows == tuple(len(tokens) - start for tokens, start in given)
    torch.testing.assert_close(batch.states, states, rtol=0, atol=0)


def test_rows_too_short_to_look_ahead_are_left_out(tmp_path):
    written(tmp_path / "train", Hidden(8), width=8)
    rows = HiddenRows(LogitCache(tmp_path / "train", "c0"), shortest=2)
    assert sorted(rows.lengths) == sorted(len(t) - s for shard in ROWS for t, s in shard if len(t) - s >= 2)


def test_positions_ahead_stay_within_their_row(tmp_path):
    written(tmp_path / "train", Hidden(16), width=8)
    rows = HiddenRows(LogitCache(tmp_path / "train", "c0"))
    batch = collate([rows[0], rows[1], rows[2]])  # 3, 1 and 1 positions
    assert [part.tolist() for part in batch.ahead(1)] == [[0, 1], [1, 2]]
    assert [part.tolist() for part in batch.ahead(2)] == [[0], [2]]
    assert batch.ahead(3)[0].tolist() == []


def test_a_cache_of_another_codec_has_no_states(tmp_path):
    written(tmp_path / "train")
    with pytest.raises(ValueError, match="holds no hidden states; write it with codec=hidden"):
        HiddenRows(LogitCache(tmp_path / "train", "c0"))[0]
