"""The words that a config key may take, where it takes one of a few; ``pipeline.config`` says which key takes which."""

from enum import Enum


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
    drafters = 9  # on request: it is not among the default stages


class Source(Enum):
    """Where prompts come from."""

    standard_library = 1
    dataset = 2


class Precision(Enum):
    """Number format of weights and matrix products; ``auto`` takes bfloat16 where a probe finds it fast."""

    auto = 1
    float32 = 2
    bfloat16 = 3


class Text(Enum):
    """What a draft learns from: answers that the target generated, answers that came with the prompts, the target's answers
    to prompts that it wrote itself, or generated answers that an earlier draft continues here and there."""

    generated = 1
    corpus = 2
    seeds = 3
    rollouts = 4


class Coding(Enum):
    """What the logit cache keeps of a distribution; ``auto`` takes the cheapest that is good enough on this text."""

    topk = 1
    sampled = 2
    hidden = 3
    dense = 4
    auto = 5


class Drafting(Enum):
    """What drafts: a small model of its own, or Medusa heads that read the target's last hidden state."""

    model = 1
    medusa = 2


class Divergence(Enum):
    """The objective of distillation."""

    forward_kl = 1
    reverse_kl = 2
    jensen_shannon = 3
    total_variation = 4
    overlap = 5
    hybrid = 6
    cross_entropy = 7


class Method(Enum):
    """Optimizers."""

    adamw = 1
    muon = 2


class Schedule(Enum):
    """How the learning rate ends: by a cosine, or by a plateau and a straight decay."""

    cosine = 1
    wsd = 2


class Verification(Enum):
    """How drafts are judged above temperature 0; all but ``typical``, which is lossy, keep the target's law."""

    token = 1
    block = 2
    match = 3
    typical = 4


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
