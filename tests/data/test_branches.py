"""Who sees whom in a row with branches, by hand and by its definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.branches import PADDING, TRUNK, beside


def test_a_row_by_hand():
    layout = beside([[5, 6, 7], [8]], [[(1, [9, 10]), (2, [11])], [(1, [12])]])
    assert layout.tokens.tolist() == [[5, 6, 7, 9, 10, 11], [8, 12, 0, 0, 0, 0]]
    assert layout.positions[0].tolist() == [0, 1, 2, 1, 2, 2]
    assert layout.cuts.tolist() == [[TRUNK, TRUNK, TRUNK, 1, 1, 2], [TRUNK, 1, *[PADDING] * 4]]
    assert layout.mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],  # 9 stands in the place of 6
        [1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    assert layout.mask()[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        *[[0] * place + [1] + [0] * (5 - place) for place in range(2, 6)],
    ]


@st.composite
def rows(draw):
    trunk = list(range(100, 100 + draw(st.integers(1, 7))))
    cuts = draw(st.lists(st.integers(0, len(trunk)), unique=True, max_size=3))
    return trunk, [(cut, list(range(200 + 10 * cut, 200 + 10 * cut + draw(st.integers(1, 3))))) for cut in cuts]


@settings(deadline=None, max_examples=60)
@given(st.lists(rows(), min_size=1, max_size=3))
def test_a_token_sees_its_text_and_nothing_else(given_rows):
    """The oracle: the text that each token ends, which stands in the row at the places that it sees."""
    trunks, branches = zip(*given_rows, strict=True)
    layout = beside(trunks, branches)
    mask = layout.mask()[:, 0]
    for row, (trunk, leaving) in enumerate(given_rows):
        texts = [trunk[: end + 1] for end in range(len(trunk))]
        texts += [[*trunk[:cut], *branch[: end + 1]] for cut, branch in leaving for end in range(len(branch))]
        for place, text in enumerate(texts):
            seen = mask[row, place].nonzero()[:, 0]
            order = layout.positions[row, seen].argsort()
            assert layout.tokens[row, seen][order].tolist() == text
            assert layout.positions[row, seen][order].tolist() == list(range(len(text)))
    assert bool(torch.diagonal(mask, dim1=1, dim2=2).all())
