"""Documents side by side in rows, each of them as if it were alone: who sees whom, and where each token stands.

Rows are as wide as the longest document, and filled first fit, longest first (Johnson, 1973). It knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """``tokens`` (B, T) and their ``positions`` (B, T) within their documents; ``owners`` (B, T): which document, −1 for none.

    ``places``: row and first column of each document, in the order they were given.
    """

    tokens: Tensor
    positions: Tensor
    owners: Tensor
    places: list[tuple[int, int]]

    @property
    def shared(self) -> bool:
        """Whether any row holds more than one document."""
        return len(self.places) > len(self.tokens)

    def mask(self) -> Tensor:
        """(B, 1, T, T): whether a token (first T) sees another: one of its own document that does not come later."""
        same = self.owners[:, :, None] == self.owners[:, None, :]
        return (same & torch.ones_like(same[0]).tril())[:, None]


def pack(documents: Sequence[Sequence[int]], share: bool = True) -> Packed:
    """The documents in as few rows as first fit finds; a row each unless ``share``."""
    lengths = [len(document) for document in documents]
    width = max(lengths)
    filled: list[int] = []  # columns in use, by row
    places = {}
    for number in sorted(range(len(documents)), key=lambda n: -lengths[n]):
        fits = (row for row, used in enumerate(filled) if share and used + lengths[number] <= width)
        row = next(fits, len(filled))
        if row == len(filled):
            filled.append(0)
        places[number] = row, filled[row]
        filled[row] += lengths[number]
    tokens = torch.zeros(len(filled), width, dtype=torch.long)
    positions, owners = torch.zeros_like(tokens), torch.full_like(tokens, -1)
    for number, (row, first) in places.items():
        span = slice(first, first + lengths[number])
        tokens[row, span] = torch.tensor(documents[number])
        positions[row, span] = torch.arange(lengths[number])
        owners[row, span] = number
    return Packed(tokens, positions, owners, [places[number] for number in range(len(documents))])
