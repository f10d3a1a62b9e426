"""The teacher pass: one batch of responses in, one sealed shard of encoded distributions out.

Where the responses' hidden states were kept, only the head runs. Which positions count and what a codec is given is decided
here; how it is stored is not. Rows of the head behind the ``ids`` are padding, and get no mass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.codec import Codec
from data.hidden import Hidden, through_head
from data.logit_cache import BRANCHES
from data.responses import Response
from data.shards import Seal, hash_of_ids, write_shard
from data.states import States
from data.targets import Targets
from pipeline.draft import head_is_last
from pipeline.errors import PipelineError
from pipeline.forward import forward
from pipeline.rollouts import KEYS, Roller
from pipeline.trainer import WithTarget

ROLLOUTS = "rollouts"  # the part of the cache whose answers a draft continues


@dataclass(frozen=True)
class Work:
    """A shard to write: its ``folder``, its ``seal``, and the responses it holds."""

    folder: Path
    seal: Seal
    batch: list[Response]

    @property
    def path(self) -> Path:
        return self.folder / self.seal.file

    @property
    def metadata(self) -> dict[str, str]:
        """What the shard says of itself when it is whole: of branches their trunks, for the draft is yet to write them."""
        return self.seal.metadata | {"trunks" if self.rolled else "ids": hash_of_ids(self.rows)}

    @property
    def rolled(self) -> bool:
        """Whether these answers are to be continued by a draft."""
        return self.folder.name == ROLLOUTS

    @property
    def rows(self) -> list[tuple[list[int], int]]:
        """The ids of prompt and response of each row, and where its response starts."""
        return [([*r.request.prompt, *r.tokens], len(r.request.prompt)) for r in self.batch]


class Teacher(WithTarget):
    """Writes the shard of each item of work, from the ``states`` kept when the responses were written, if they were.

    ``roller`` continues the answers of work that wants it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        states: States | None = None,
        load: Callable[[], PreTrainedModel] | None = None,
        roller: Roller | None = None,
    ) -> None:
        super().__init__(model, load)
        self.states, self.roller = states, roller

    def predict_step(self, item: Work) -> int:
        codec = item.seal.codec
        if item.rolled:
            return self._roll(item)
        outputs = known(self.target, item.batch, self.states, isinstance(codec, Hidden), item.seal.vocabulary)
        try:
            encoded = [codec.encode(row, response.request.key) for row, response in zip(outputs, item.batch, strict=True)]
        except ValueError as error:  # of codec hidden alone
            raise PipelineError(f"codec.kind=hidden: {error}; use codec=topk, or codec=dense") from error
        write_shard(item.folder, item.rows, _together(encoded), item.seal)
        return len(item.batch)

    def _roll(self, item: Work) -> int:
        codec = item.seal.codec
        found = self.roller.roll(self.target, item.batch, isinstance(codec, Hidden), item.seal.vocabulary)
        pairs = zip(found, item.batch, strict=True)
        encoded = [codec.encode(rolled.outputs, KEYS + response.request.key) for rolled, response in pairs]
        branches = {name: torch.cat([getattr(rolled, name) for rolled in found]) for name in BRANCHES}
        rows = [(rolled.tokens, rolled.start) for rolled in found]
        write_shard(item.folder, rows, _together(encoded) | branches, item.seal, {"trunks": hash_of_ids(item.rows)})
        return len(item.batch)


def _together(encoded: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name].cpu() for part in encoded]) for name in encoded[0]}


def known(
    model: PreTrainedModel, batch: list[Response], states: States | None, hidden: bool, ids: int | None = None
) -> Sequence[Tensor]:
    """What ``forward`` gives, from the ``states`` that were kept when the responses were written; without them, ``forward``."""
    if states is None:
        return forward(model, batch, hidden, ids)
    kept = [states.of(response.request.key).to(model.device) for response in batch]
    if hidden:
        return kept
    head = model.get_output_embeddings()
    return head(torch.cat(kept).to(head.weight.dtype))[:, :ids].split([len(part) for part in kept])


def head_of(model: PreTrainedModel, ids: int | None = None) -> tuple[Tensor, Tensor | None]:
    """The target's head: ``weight`` (V, d) and ``bias`` (V,) or None; V is ``ids``, or all rows."""
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    return head.weight[:ids], None if bias is None else bias[:ids]


def check_plain_head(model: PreTrainedModel) -> None:
    """Refuse a target whose logits are not its head times its last hidden state.

    Raises:
        PipelineError: naming a codec that does not need this.
    """
    if not head_is_last(model, 1e-2):
        raise PipelineError("codec.kind=hidden: this target changes its logits after its head; use codec=topk")


def decoded(codec: Codec, stored: dict[str, Tensor], model: PreTrainedModel, ids: int) -> Targets:
    """What a reader of the cache would see of encoded positions."""
    if not isinstance(codec, Hidden):
        return codec.decode(stored, ids)
    weight, bias = (None if tensor is None else tensor.detach().float().cpu() for tensor in head_of(model, ids))
    return through_head(codec.decode_hidden(stored), weight, bias)
