"""The typed configuration: one frozen dataclass for each config group; values live in ``conf/``.

Hydra checks names and types against these classes; ``check`` refuses values that no stage could use. Only the entry
point sees a DictConfig, everything behind it sees these.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from pipeline.errors import PipelineError


class Stage(Enum):
    """The stages, in the order they run."""

    corpus = 1
    generate = 2
    logits = 3
    distil = 4
    calibrate = 5
    speculate = 6
    report = 7
    export = 8


class Source(Enum):
    """Where prompts come from."""

    standard_library = 1
    dataset = 2


class Precision(Enum):
    """Number format of weights and matrix products; ``auto`` takes bfloat16 where a probe finds it fast."""

    auto = 1
    float32 = 2
    bfloat16 = 3


@dataclass(frozen=True)
class Paths:
    work: str = "outputs"


@dataclass(frozen=True)
class Corpus:
    source: Source = Source.standard_library
    path: str | None = None
    column: str = "prompt"
    document_column: str | None = None
    train: int = 1700
    validation: int = 48
    test: int = 48


@dataclass(frozen=True)
class Target:
    path: str = ""
    sha256: str | None = None
    precision: Precision = Precision.auto
    system_prompt: str | None = None


@dataclass(frozen=True)
class Generate:
    temperatures: list[float] = field(default_factory=lambda: [1.0, 0.0])
    shares: list[float] = field(default_factory=lambda: [0.75, 0.25])
    max_new_tokens: int = 128
    max_prompt_tokens: int = 256
    batch_size: int = 128


@dataclass(frozen=True)
class Codec:
    top_k: int = 128
    evaluation_top_k: int = 1024
    batch_size: int = 16


@dataclass(frozen=True)
class Draft:
    path: str | None = None
    layers: list[int] = field(default_factory=lambda: [0, 1])
    fit_head: bool = True
    vocabulary_size: int = 8192
    train_embedding: bool = False


class Divergence(Enum):
    """The objective of distillation."""

    forward_kl = 1
    reverse_kl = 2
    jensen_shannon = 3
    total_variation = 4
    overlap = 5
    hybrid = 6
    cross_entropy = 7


@dataclass(frozen=True)
class Objective:
    divergence: Divergence = Divergence.forward_kl
    beta: float = 0.5
    eta: float = 3.0
    hard_weight: float = 0.0


class Method(Enum):
    """Optimizers."""

    adamw = 1
    muon = 2


class Schedule(Enum):
    """How the learning rate ends: by a cosine, or by a plateau and a straight decay."""

    cosine = 1
    wsd = 2


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


class Verification(Enum):
    """How drafts are judged above temperature 0; all keep the target's law."""

    token = 1
    block = 2
    match = 3


@dataclass(frozen=True)
class Decoding:
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: Verification = Verification.token
    draft_tokens: int | None = None
    longest_draft: int = 5
    prompts: int = 12
    max_new_tokens: int = 80
    lossless_tokens: int = 64
    baselines: bool = True


@dataclass(frozen=True)
class Tracking:
    uri: str | None = None
    experiment: str = "draftsmith"


@dataclass(frozen=True)
class Export:
    path: str | None = None


@dataclass(frozen=True)
class Config:
    stages: list[Stage] = field(default_factory=lambda: list(Stage))
    seed: int = 0
    threads: int | None = None
    paths: Paths = field(default_factory=Paths)
    corpus: Corpus = field(default_factory=Corpus)
    target: Target = field(default_factory=Target)
    generate: Generate = field(default_factory=Generate)
    codec: Codec = field(default_factory=Codec)
    draft: Draft = field(default_factory=Draft)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    trainer: Trainer = field(default_factory=Trainer)
    decoding: Decoding = field(default_factory=Decoding)
    tracking: Tracking = field(default_factory=Tracking)
    export: Export = field(default_factory=Export)


def check(config: Config) -> None:
    """Refuse values that no stage could use.

    Raises:
        PipelineError: naming the key, the value and what is allowed.
    """
    positive = {
        "corpus.train": config.corpus.train,
        "corpus.validation": config.corpus.validation,
        "corpus.test": config.corpus.test,
        "generate.max_new_tokens": config.generate.max_new_tokens,
        "generate.max_prompt_tokens": config.generate.max_prompt_tokens,
        "generate.batch_size": config.generate.batch_size,
        "codec.top_k": config.codec.top_k,
        "codec.evaluation_top_k": config.codec.evaluation_top_k,
        "codec.batch_size": config.codec.batch_size,
        "optimizer.learning_rate": config.optimizer.learning_rate,
        "optimizer.muon_learning_rate": config.optimizer.muon_learning_rate,
        "trainer.max_steps": config.trainer.max_steps,
        "trainer.batch_size": config.trainer.batch_size,
        "trainer.accumulate": config.trainer.accumulate,
        "trainer.validate_every": config.trainer.validate_every,
        "optimizer.gradient_clip": config.optimizer.gradient_clip,
        "decoding.longest_draft": config.decoding.longest_draft,
        "decoding.prompts": config.decoding.prompts,
        "decoding.max_new_tokens": config.decoding.max_new_tokens,
        "decoding.lossless_tokens": config.decoding.lossless_tokens,
    }
    for key, value in positive.items():
        require(value > 0, key, value, "give a number above 0")
    require(bool(config.stages), "stages", "[]", f"name at least one of {', '.join(s.name for s in Stage)}")
    require(config.seed >= 0, "seed", config.seed, "give a number ≥ 0")
    require(config.threads is None or config.threads > 0, "threads", config.threads, "give a number above 0, or null")
    optimizer, objective = config.optimizer, config.objective
    shares = {f"optimizer.{name}": getattr(optimizer, name) for name in ("warmup_share", "decay_share", "final_share")}
    for key, share in (shares | {"objective.hard_weight": objective.hard_weight}).items():
        require(0 <= share <= 1, key, share, "give a number from 0 to 1")
    room = optimizer.schedule is not Schedule.wsd or optimizer.warmup_share + optimizer.decay_share <= 1
    require(room, "optimizer.decay_share", optimizer.decay_share, "give at most 1 − optimizer.warmup_share")
    require(0 < objective.beta < 1, "objective.beta", objective.beta, "give a number between 0 and 1, not these two; for "
            "their limits choose objective=forward_kl or objective=reverse_kl")  # fmt: skip
    require(0 <= objective.eta < math.inf, "objective.eta", objective.eta, "give a number ≥ 0; 0 is forward KL alone")
    from_dataset = config.corpus.source is Source.dataset
    require(
        not from_dataset or bool(config.corpus.path), "corpus.path", config.corpus.path, "give a file, folder or dataset name"
    )
    generate, decoding, draft = config.generate, config.decoding, config.draft
    require(bool(generate.temperatures), "generate.temperatures", "[]", "give at least one temperature")
    require(bool(decoding.temperatures), "decoding.temperatures", "[]", "give at least one temperature")
    betas = config.optimizer.betas
    require(len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "optimizer.betas", betas, "give two numbers in [0, 1)")
    for key, temperatures in (("generate", generate.temperatures), ("decoding", decoding.temperatures)):
        require(all(t >= 0 for t in temperatures), f"{key}.temperatures", temperatures, "temperatures are ≥ 0")
    missing = sorted(set(decoding.temperatures) - set(generate.temperatures))
    require(not missing, "decoding.temperatures", missing, "decoding needs text written at the same temperature: "
            "add it to generate.temperatures")  # fmt: skip
    require(len(generate.shares) == len(generate.temperatures) and min(generate.shares) >= 0 and sum(generate.shares) > 0,
            "generate.shares", generate.shares, "give one share ≥ 0 for each of generate.temperatures")  # fmt: skip
    require(decoding.draft_tokens is None or 0 < decoding.draft_tokens <= decoding.longest_draft, "decoding.draft_tokens",
            decoding.draft_tokens, "null lets calibration choose; else 1 … decoding.longest_draft")  # fmt: skip
    require(bool(draft.layers or draft.path), "draft.layers", draft.layers, "name layers of the target, or give draft.path")
    require(draft.vocabulary_size >= 0, "draft.vocabulary_size", draft.vocabulary_size, "0 keeps the whole vocabulary")
    require(0 < decoding.top_p <= 1, "decoding.top_p", decoding.top_p, "give a number in (0, 1]")
    require(0 <= decoding.min_p <= 1, "decoding.min_p", decoding.min_p, "give a number from 0 to 1; 0 switches it off")
    require(decoding.top_k >= 0, "decoding.top_k", decoding.top_k, "0 switches it off")
    require(bool(config.target.path), "target.path", "''", "give a folder, a hub name, a GGUF file or package:NAME")


def require(holds: bool, key: str, value: object, fix: str) -> None:
    """Raise PipelineError "key=value: fix" unless ``holds``."""
    if not holds:
        raise PipelineError(f"{key}={value}: {fix}")
