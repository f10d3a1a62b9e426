"""The typed configuration: one frozen dataclass for each config group; values live in ``conf/``.

Hydra checks names and types against these classes, ``pipeline.check`` refuses values that no stage could use. Only the
entry point sees a DictConfig, everything behind it sees these.
"""

from dataclasses import dataclass, field
from typing import Any

from pipeline.choices import (
    Coding,
    Divergence,
    Drafting,
    Format,
    GgufType,
    Method,
    Precision,
    Schedule,
    Source,
    Stage,
    Text,
    Verification,
)


@dataclass(frozen=True)
class Paths:
    work: str = "outputs"


@dataclass(frozen=True)
class Corpus:
    source: Source = Source.standard_library
    path: str | None = None
    column: str = "prompt"
    document_column: str | None = None
    response_column: str | None = None
    train: int = 1700
    validation: int = 48
    test: int = 48


@dataclass(frozen=True)
class Target:
    path: str = ""
    sha256: str | None = None
    precision: Precision = Precision.auto
    device_map: str | None = None
    system_prompt: str | None = None


@dataclass(frozen=True)
class Generate:
    temperatures: list[float] = field(default_factory=lambda: [1.0, 0.0])
    shares: list[float] = field(default_factory=lambda: [0.75, 0.25])
    max_new_tokens: int = 128
    max_prompt_tokens: int = 256
    batch_size: int = 128
    keep_states: bool = True


@dataclass(frozen=True)
class Regime:
    kind: Text = Text.generated
    share: float = 1.0
    starts: int = 16
    length: int = 2


@dataclass(frozen=True)
class Codec:
    kind: Coding = Coding.topk
    top_k: int = 32
    top_mass: float | None = None
    evaluation_top_k: int = 1024
    tail_samples: int = 14
    samples: int = 64
    temperature: float = 1.0
    bits: int = 8
    max_overlap_error: float = 0.003
    batch_size: int = 16

    @property
    def draws(self) -> bool:
        """Whether some of the ids that training reads were drawn."""
        return self.kind is Coding.sampled or (self.kind is Coding.topk and self.tail_samples > 0)


@dataclass(frozen=True)
class Logits:
    dry_run: bool = False
    verify: bool = False
    repair: bool = False


@dataclass(frozen=True)
class Draft:
    kind: Drafting = Drafting.model
    heads: int = 4
    path: str | None = None
    layers: list[int] = field(default_factory=lambda: [0, 1])
    width: int | None = None
    fit_head: bool = True
    vocabulary_size: int = 8192
    coverage: float | None = None
    head_rank: int | None = None
    train_embedding: bool = False


@dataclass(frozen=True)
class Objective:
    divergence: Divergence = Divergence.forward_kl
    beta: float = 0.5
    eta: float = 3.0
    hard_weight: float = 0.0
    reference: str | None = None
    keep: float = 1.0


@dataclass(frozen=True)
class Optimizer:
    method: Method = Method.muon
    learning_rate: float = 2e-3
    muon_learning_rate: float = 2e-2
    schedule: Schedule = Schedule.cosine
    final_share: float = 0.1
    warmup_share: float = 0.05
    decay_share: float = 0.2
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    gradient_clip: float = 1.0


@dataclass(frozen=True)
class Trainer:
    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    strategy: str = "auto"
    precision: Precision = Precision.auto
    max_steps: int = 600
    batch_size: int = 16
    accumulate: int = 1
    validate_every: int = 100
    patience: int = 0
    seed: int | None = None
    compile: bool = False


@dataclass(frozen=True)
class Decoding:
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: Verification = Verification.token
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    draft_tokens: int | None = None
    tree: Any = "off"
    longest_draft: int = 5
    prompts: int = 12
    max_new_tokens: int = 80
    lossless_tokens: int = 64
    baselines: bool = True
    compile: bool = False


@dataclass(frozen=True)
class Drafters:
    heads: str | None = None
    path: str | None = None
    column: str = "turns"
    category: str = "category"
    prompts: int = 8
    max_prompt_tokens: int = 1024


@dataclass(frozen=True)
class Tracking:
    uri: str | None = None
    experiment: str = "draftsmith"
    required: bool = True


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
    register: str | None = None

    @property
    def with_transformers(self) -> bool:
        return self.format is not Format.gguf

    @property
    def with_gguf(self) -> bool:
        return self.format is not Format.transformers


@dataclass(frozen=True)
class Config:
    stages: list[Stage] = field(default_factory=lambda: [stage for stage in Stage if stage is not Stage.drafters])
    seed: int = 0
    threads: int | None = None
    paths: Paths = field(default_factory=Paths)
    corpus: Corpus = field(default_factory=Corpus)
    target: Target = field(default_factory=Target)
    generate: Generate = field(default_factory=Generate)
    regime: Regime = field(default_factory=Regime)
    codec: Codec = field(default_factory=Codec)
    logits: Logits = field(default_factory=Logits)
    draft: Draft = field(default_factory=Draft)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    trainer: Trainer = field(default_factory=Trainer)
    decoding: Decoding = field(default_factory=Decoding)
    drafters: Drafters = field(default_factory=Drafters)
    tracking: Tracking = field(default_factory=Tracking)
    export: Export = field(default_factory=Export)
