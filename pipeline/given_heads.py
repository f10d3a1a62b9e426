"""Medusa heads that an earlier run trained, brought to the comparison: what they must be, and what they have learnt from.

Small files beside the weights tell all of it, so it is told before anything runs. It knows no race and no table.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.artifact import MANIFEST, folder_hash
from pipeline.errors import PipelineError
from speculative import medusa

FEWEST_FOR_TREES = 2  # trees are timed two levels deep


@dataclass(frozen=True)
class GivenHeads:
    """The result folder of the stage distil that ``drafters.heads`` names.

    Raises:
        PipelineError: it is none.
    """

    named: str

    def __post_init__(self) -> None:
        if not (self.folder / MANIFEST).is_file() or not self.draft.is_dir():
            fix = "give a result folder of the stage distil, with its manifest and draft"
            raise PipelineError(f"drafters.heads={self.named}: {fix}")

    @property
    def folder(self) -> Path:
        return Path(self.named).expanduser().resolve()

    @property
    def draft(self) -> Path:
        return self.folder / "draft"

    @property
    def fingerprint(self) -> str:
        """A hash of the files of the heads."""
        return folder_hash(self.draft)

    def check(self, target: str, tree: Any) -> None:
        """Refuse what cannot draft for ``target``, or not with ``tree`` (decoding.tree).

        Raises:
            PipelineError: no heads, heads of another target, or too few of them.
        """
        if not (self.draft / medusa.CONFIG).is_file():
            fix = "a draft model lies there; name the folder of a run with draft=medusa"
            raise PipelineError(f"drafters.heads={self.named}: {fix}")
        config = json.loads((self.draft / medusa.CONFIG).read_text())
        if config["target"] != target:
            theirs = f"they belong to the target {config['target']}, this run's is {target}"
            raise PipelineError(f"drafters.heads={self.named}: {theirs}; name heads that were trained for it")
        count, depth = config["heads"], len(tree) if isinstance(tree, list) else 1
        if depth > count:
            raise PipelineError(f"decoding.tree={tree}: the {count} heads of drafters.heads draft no tree deeper than that")
        if tree != "off" and count < FEWEST_FOR_TREES:
            fix = f"trees are timed two levels deep, drafters.heads has {count} head; give decoding.tree=off"
            raise PipelineError(f"decoding.tree={tree}: {fix}")

    def foreign(self, generate: str, corpus: str) -> str:
        """What is to be said of figures on this run's prompts, "" where nothing is.

        ``generate`` and ``corpus`` are the fingerprints of this run's responses and prompts. Another corpus may have put
        prompts into training that this run holds out.
        """
        responses = _parents(self.folder)["generate"]
        if responses == generate:
            return ""
        place = self.folder.parent.parent / "generate" / responses
        theirs = _parents(place)["corpus"] if (place / MANIFEST).is_file() else None
        if theirs == corpus:
            return ""
        which = (
            "from prompts that are not known here" if theirs is None else f"from corpus {theirs}, where this run has {corpus}"
        )
        return (
            f"The Medusa heads learnt {which}: they may have been trained on some of the chat prompts that are compared here."
        )


def _parents(folder: Path) -> dict[str, str]:
    """Fingerprints of the results that a result was made from, by stage."""
    return json.loads((folder / MANIFEST).read_text())["identity"]["parents"]
