"""The table of cache sizes in the README is what the dry run's own function says."""

from pathlib import Path

import pytest

from data.codec import Codec, size
from data.dense import Dense
from data.hidden import Hidden
from data.topk import TopK

README = (Path(__file__).parents[2] / "README.md").read_text()
VOCABULARY, WIDTHS, TOKENS, ANSWER, SHARD = 128_256, (4096, 8192), (10**9, 10**10), 512, 16
CODECS: dict[str, Codec] = {
    "`codec.top_k=8 codec.tail_samples=6`": TopK(8, 6, bits=8),
    "`codec=topk`": TopK(32, 14, bits=8),
    "`codec=hidden`": Hidden(8),
    "`codec=hidden codec.bits=16`": Hidden(16),
    "`codec=dense`": Dense(),
}


@pytest.mark.parametrize("name", CODECS)
def test_the_readme_says_what_the_cache_would_weigh(name):
    found = []
    for width in WIDTHS:
        for tokens in TOKENS:
            rows = tokens // ANSWER
            terabytes = size(CODECS[name], VOCABULARY, width, tokens, 2 * tokens, rows, rows // SHARD) / 1e12
            found.append(f"{terabytes:,.2f}" if terabytes < 10 else f"{terabytes:,.0f}")
    assert f"| {name} | {' | '.join(found)} |" in README
