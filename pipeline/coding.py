"""What lies where in the logit cache, encoded by which codec, and what the whole weighs before it is written."""

from collections.abc import Iterable

from transformers import PreTrainedModel

from data.codec import Codec, size
from data.dense import Dense
from data.hidden import Hidden
from data.logit_cache import LogitCache
from data.responses import Response, read_shards
from data.sampled import Sampled
from data.states import States
from data.topk import TopK
from data.topmass import TopMass
from pipeline.choices import Coding, Stage, Text
from pipeline.config import Codec as CodecConfig
from pipeline.config import Config
from pipeline.context import Context
from pipeline.draft import head_is_last
from pipeline.errors import PipelineError
from pipeline.forward import BLOCK
from pipeline.teacher import ROLLOUTS, head_of

SPARE_BYTES = 1 << 28  # room that must stay free beside the cache
Parts = dict[str, tuple[list[Response], Codec]]  # by folder


def responses(context: Context) -> list[Response]:
    """The responses that are not empty."""
    return [r for r in read_shards(context.parent(Stage.generate).folder) if r.tokens]


def kept_states(context: Context, model: PreTrainedModel) -> States | None:
    """The hidden states kept with the responses, where head and states are all that the target's logits are made of."""
    if context.config.generate.keep_states and head_is_last(model, 1e-2):
        return States(context.parent(Stage.generate).folder)
    return None


def parts(config: Config, rows: list[Response]) -> Parts:
    """Responses and codec of each folder of the cache."""
    codec, seed = config.codec, config.seed
    exact = TopK(codec.evaluation_top_k)
    train, held_out = {
        Coding.topk: (_best(codec, seed), exact),
        Coding.sampled: (Sampled(codec.samples, codec.temperature, seed, codec.bits), exact),
        Coding.hidden: (Hidden(codec.bits), Hidden(codec.bits)),
        Coding.dense: (Dense(), Dense()),
    }[codec.kind]
    groups: Parts = {"train": ([r for r in rows if r.request.split == "train"], train)}
    if config.regime.kind is Text.rollouts:
        more = config.regime.starts * config.regime.length
        groups[ROLLOUTS] = ([r for r in groups["train"][0] if r.length + more <= BLOCK], train)
    for temperature in config.generate.temperatures:
        groups[validation_name(temperature)] = (_validation(rows, temperature), held_out)
    return groups


def _validation(rows: Iterable[Response], temperature: float) -> list[Response]:
    return [r for r in rows if r.request.split == "validation" and r.request.temperature == temperature]


def in_order(rows: Iterable[Response]) -> list[Response]:
    """Responses of one folder in the order in which its shards hold them, the longest first."""
    return sorted(rows, key=lambda r: (-r.length, r.request.key))


def validation_kinds(rows: Iterable[Response], temperature: float, cache: LogitCache) -> list[str]:
    """The kind of prompt of each row of ``cache``, the validation text that was written at ``temperature``.

    Raises:
        PipelineError: what the cache holds is not as long as those of the responses ``rows``.
    """
    written = in_order(_validation(rows, temperature))
    if [(r.length, len(r.request.prompt)) for r in written] != list(zip(cache.lengths, cache.starts, strict=True)):
        raise PipelineError(
            f"logits: {validation_name(temperature)} of the cache does not hold the responses of generate; write it again with "
            "stages=[logits] logits.repair=true"
        )
    return [r.request.kind for r in written]


def _best(codec: CodecConfig, seed: int) -> TopK | TopMass:
    if codec.top_mass is None:
        return TopK(codec.top_k, codec.tail_samples, seed, codec.bits)
    return TopMass(codec.top_k, codec.top_mass, codec.tail_samples, seed, codec.bits)


def estimate(groups: Parts, model: PreTrainedModel, config: Config) -> int:
    """Bytes of the cache on disk."""
    shapes = head_of(model)[0].shape
    total = 0
    for name, (rows, codec) in groups.items():
        positions, tokens = sum(len(r.tokens) for r in rows), sum(r.length for r in rows)
        if name == ROLLOUTS:
            positions = sum(min(config.regime.starts, len(r.tokens)) for r in rows) * config.regime.length
            tokens += positions * 3  # ids, cuts and survival
        total += size(codec, *shapes, positions, tokens, len(rows), -(-len(rows) // config.codec.batch_size))
    if any(isinstance(codec, Hidden) for _, codec in groups.values()):
        total += sum(tensor.nbytes for tensor in head_of(model) if tensor is not None)  # one copy serves all parts
    return total


def validation_name(temperature: float) -> str:
    """Folder of the cache of validation text written at ``temperature``."""
    return f"validation-{temperature:g}"
