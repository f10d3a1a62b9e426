"""Documents in shared rows: none lost, none cut, none that sees another."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.documents import pack


def test_a_row_by_hand():
    packed = pack([(5, 6), (1, 2, 3, 4), (7,), (8, 9)])
    assert packed.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 8, 9], [7, 0, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 0, 0]]
    assert packed.owners.tolist() == [[1, 1, 1, 1], [0, 0, 3, 3], [2, -1, -1, -1]]
    assert packed.places == [(1, 0), (0, 0), (2, 0), (1, 2)]
    assert packed.shared
    assert packed.mask()[1, 0].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]
    assert not pack([(5, 6), (7,)], share=False).shared


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=12))
def test_every_document_is_whole_and_alone_in_what_it_sees(documents):
    packed = pack(documents)
    alone = pack(documents, share=False)
    assert len(packed.tokens) <= len(alone.tokens) == len(documents)
    assert packed.tokens.shape[1] == max(map(len, documents))
    mask = packed.mask()[:, 0]
    for number, (document, (row, first)) in enumerate(zip(documents, packed.places, strict=True)):
        span = slice(first, first + len(document))
        assert packed.tokens[row, span].tolist() == document
        assert packed.positions[row, span].tolist() == list(range(len(document)))
        assert set(packed.owners[row, span].tolist()) == {number}
        assert torch.equal(mask[row, span, span], torch.ones(len(document), len(document), dtype=torch.bool).tril())
        assert int(mask[row, span].sum()) == len(document) * (len(document) + 1) // 2
    assert int((packed.owners >= 0).sum()) == sum(map(len, documents))
