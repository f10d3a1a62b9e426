"""A prompt, a corpus of them, and what goes wrong on the way there.

A prompt's id is a hash of its source, kind and text, so the same prompt has the same id in every run. The source is
the document that a prompt belongs to: the splits never share one. It knows nothing of chat templates or tokens.
"""

from dataclasses import dataclass

from data.artifact import fingerprint


class CorpusError(ValueError):
    """The corpus cannot be made as configured; the message names the config key, its value and the fix."""


@dataclass(frozen=True)
class Prompt:
    """One user turn; ``kind`` is the slice that results are reported by, ``response`` an answer that came with it."""

    id: str
    source: str
    kind: str
    text: str
    response: str | None = None


@dataclass(frozen=True)
class Corpus:
    """Prompts by split, and how many were lost where.

    ``counts``, all in prompts: "read" = "kept" + the sum of "dropped/<reason>";
    "truncated/<reason>" are among those read.
    """

    splits: dict[str, list[Prompt]]
    counts: dict[str, int]


def prompt(source: str, kind: str, text: str, response: str | None = None) -> Prompt:
    """A prompt with its id: the first 16 hex digits of a SHA-256 over source, kind and text."""
    return Prompt(fingerprint([source, kind, text]), source, kind, text, response)
