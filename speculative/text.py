"""From ids to text while decoding: characters that are complete, and strings that end a row.

A character may be spread over tokens, and a stop string over tokens and rounds; text is handed on only when no later
token can change or take back any of it. Special tokens leave no text; as stop strings they are known by their ids.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "�"


class _Row:
    """The text of one row so far: ``text`` is final but for what a stop string may still cut, ``taken`` was handed on."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.taken = 0
        self.window, self.read = 0, 0  # ids before ``read`` are in ``text``; decoding starts at ``window``, for spacing
        self.cut: int | None = None


class Transcript:
    """The text of every row. Called by the engine with new ids, it answers where a stop string ends the row.

    Raises:
        ValueError: a stop string with a special token and more in it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: int, stop_strings: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stop_strings)
        self.stop_ids = _special_ids(tokenizer, self.stops) if self.stops else set()
        self.rows = [_Row() for _ in range(rows)]

    def __call__(self, row: int, ids: Sequence[int]) -> int | None:
        """Add new ids of a row; how many of them stay if a stop string is complete in them, else None."""
        state = self.rows[row]
        for place, token in enumerate(ids, start=1):
            state.ids.append(token)
            before = len(state.text)
            state.text += self._rest(state) if token in self.stop_ids else self._piece(state)
            found = [at for stop in self.stops if (at := state.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
            found += [len(state.text)] if token in self.stop_ids else []
            if found:
                state.cut = min(found)
                return place
        return None

    def _piece(self, state: _Row) -> str:
        """The text that became complete with the last id."""
        known = self._decode(state.ids[state.window : state.read])
        now = self._decode(state.ids[state.window :])
        if now.endswith(UNFINISHED) or len(now) <= len(known):
            return ""
        state.window, state.read = state.read, len(state.ids)
        return now[len(known) :]

    def _rest(self, state: _Row) -> str:
        """The text of the ids so far that is not in ``text``, complete or not."""
        return self._decode(state.ids[state.window :])[len(self._decode(state.ids[state.window : state.read])) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def take(self, row: int, last: bool) -> str:
        """Text of the row that was not handed on yet and is certain; all of it at the ``last`` call."""
        state = self.rows[row]
        if last and state.cut is None:
            state.text += self._rest(state)
        end = len(state.text) if state.cut is None else state.cut
        if not last:
            end -= self._could_begin_a_stop(state.text)
        piece = state.text[state.taken : end]
        state.taken = max(state.taken, end)
        return piece

    def _could_begin_a_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        sizes = (n for n in range(min(longest, len(text)), 0, -1) if any(stop.startswith(text[-n:]) for stop in self.stops))
        return next(sizes, 0)


def _special_ids(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> set[int]:
    """The ids of those ``stops`` that are special tokens."""
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for stop in stops:
        within = next((token for token in special if token in stop and stop not in special), None)
        if within is not None:
            fix = f"give {within!r} alone, or its id {special[within]} in eos_token_ids"
            raise ValueError(f"stop_strings: {stop!r} holds the special token {within!r}, which leaves no text; {fix}")
    return {special[stop] for stop in stops if stop in special}
