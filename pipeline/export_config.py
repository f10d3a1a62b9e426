"""The config group ``export``: where the draft goes, in which formats, and what it must have shown before.

The gate's thresholds are values of the user; what they are compared with is measured by other stages.
"""

from dataclasses import dataclass
from enum import Enum

from pipeline.errors import PipelineError


class Format(Enum):
    """What is written: safetensors with tokenizer files, one GGUF file, or both."""

    transformers = 1
    gguf = 2
    both = 3


class GgufType(Enum):
    """Number format of the matrices in a GGUF file; vectors stay in float32."""

    f32 = 1
    f16 = 2
    bf16 = 3
    q8_0 = 4


@dataclass(frozen=True)
class Export:
    path: str | None = None
    overwrite: bool = False
    format: Format = Format.transformers
    gguf_type: GgufType = GgufType.f16
    gate: bool = True
    minimum_overlap: float = 0.1
    minimum_ratio: float = 1.0
    lossless: bool = True
    maximum_memory: float | None = None

    @property
    def with_transformers(self) -> bool:
        return self.format is not Format.gguf

    @property
    def with_gguf(self) -> bool:
        return self.format is not Format.transformers


def check(export: Export) -> None:
    """Refuse thresholds that no draft, or every draft, would pass by mistake.

    Raises:
        PipelineError: naming the key, the value and what is allowed.
    """
    if not 0 <= export.minimum_overlap <= 1:
        raise PipelineError(f"export.minimum_overlap={export.minimum_overlap}: give a number from 0 to 1; 0 asks for nothing")
    if not 0 <= export.minimum_ratio < float("inf"):
        raise PipelineError(f"export.minimum_ratio={export.minimum_ratio}: give a number ≥ 0; 0 asks for nothing")
    if export.maximum_memory is not None and not export.maximum_memory > 0:
        raise PipelineError(f"export.maximum_memory={export.maximum_memory}: give MiB above 0, or null for no limit")
