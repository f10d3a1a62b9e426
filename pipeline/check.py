"""Values of the configuration that no stage could use are refused here, before anything runs.

One function for each part of the configuration. It knows no file and no model: what only those can tell (a path that is
not there, a layer that the target lacks) the stage itself refuses.
"""

import math
import os
import re
import shutil
from itertools import accumulate
from operator import mul

from data.serving import refusal
from pipeline.choices import Coding, Divergence, Drafting, Schedule, Source, Stage, Text, Verification
from pipeline.config import Codec, Config, Corpus, Decoding, Draft, Export, Generate, Logits, Objective, Optimizer, Trainer
from pipeline.errors import PipelineError

LARGEST_TREE = 128  # nodes, as in speculative.tree
FEWEST_PROMPTS = 6  # whose ratios have an interval, as in pipeline.statistics


def check(config: Config) -> None:
    """Refuse values that no stage could use.

    Raises:
        PipelineError: naming the key, the value and what is allowed.
    """
    _positive(config)
    require(bool(config.stages), "stages", "[]", f"name at least one of {', '.join(s.name for s in Stage)}")
    require(config.seed >= 0, "seed", config.seed, "give a number ≥ 0")
    require(config.threads is None or config.threads > 0, "threads", config.threads, "give a number above 0, or null")
    _corpus(config.corpus)
    _generate(config.generate)
    _regime(config)
    _codec(config.codec, config.objective)
    _objective(config.objective)
    _logits(config.logits, config.stages)
    if config.draft.kind is Drafting.medusa:
        _medusa(config)
    _draft(config.draft)
    _optimizer(config.optimizer)
    _trainer(config.trainer, config.objective)
    _decoding(config.decoding, config.generate)
    _compiled(config)
    _tree(config)
    _typical(config)
    _drafters(config)
    _export(config.export)
    _gate(config)
    spread = config.target.device_map
    require(spread in (None, "auto"), "target.device_map", spread, "give auto, or null for one device")
    require(bool(config.target.path), "target.path", "''", "give a folder, a hub name, a GGUF file or package:NAME")


def require(holds: bool, key: str, value: object, fix: str) -> None:
    """Raise PipelineError "key=value: fix" unless ``holds``."""
    if not holds:
        raise PipelineError(f"{key}={value}: {fix}")


def _positive(config: Config) -> None:
    groups = {
        "corpus": ("train", "validation", "test"),
        "generate": ("max_new_tokens", "max_prompt_tokens", "batch_size"),
        "codec": ("top_k", "evaluation_top_k", "samples", "temperature", "batch_size"),
        "optimizer": ("learning_rate", "muon_learning_rate", "gradient_clip"),
        "trainer": ("max_steps", "batch_size", "accumulate", "validate_every"),
        "decoding": ("longest_draft", "prompts", "max_new_tokens", "lossless_tokens"),
        "drafters": ("prompts", "max_prompt_tokens"),
    }
    for group, keys in groups.items():
        for key in keys:
            value = getattr(getattr(config, group), key)
            require(value > 0, f"{group}.{key}", value, "give a number above 0")


def _corpus(corpus: Corpus) -> None:
    named = corpus.source is not Source.dataset or bool(corpus.path)
    require(named, "corpus.path", corpus.path, "give a file, folder or dataset name")


def _generate(generate: Generate) -> None:
    temperatures, shares = generate.temperatures, generate.shares
    require(bool(temperatures), "generate.temperatures", "[]", "give at least one temperature")
    require(all(t >= 0 for t in temperatures), "generate.temperatures", temperatures, "temperatures are ≥ 0")
    divided = len(shares) == len(temperatures) and min(shares) >= 0 and sum(shares) > 0
    require(divided, "generate.shares", shares, "give one share ≥ 0 for each of generate.temperatures")


def _regime(config: Config) -> None:
    regime, draft = config.regime, config.draft
    kind, divergence = regime.kind.name, config.objective.divergence.name
    require(0 < regime.share <= 1, "regime.share", regime.share, "give a share above 0 and up to 1")
    named = config.corpus.source is not Source.dataset or config.corpus.response_column is not None
    if regime.kind is Text.corpus:
        require(named, "corpus.response_column", "null", "regime=corpus learns from a column of answers; name it")
    if regime.kind is not Text.rollouts:
        return
    for key in ("starts", "length"):
        require(getattr(regime, key) > 0, f"regime.{key}", getattr(regime, key), "give a number above 0")
    require(
        regime.share < 1, "regime.share", regime.share, "give a share of the batches below 1; the others are the target's text"
    )
    model = draft.kind is Drafting.model
    require(model, "regime.kind", kind, "Medusa heads read the target's states and no text of theirs; give regime=generated")
    fix = "only a draft that has learnt something continues a text usefully; distil one first and name its folder in draft.path"
    require(draft.path is not None, "regime.kind", kind, fix)
    hard = divergence == Divergence.cross_entropy.name or config.objective.hard_weight > 0
    fix = "nobody wrote what follows a draft's own tokens, so they have no hard labels; choose another, or regime=generated"
    require(not hard, "objective.divergence", f"{divergence} (hard_weight={config.objective.hard_weight:g})", fix)
    fix = "positions of rollouts weigh as the draft survives to them; leave it out"
    require(config.objective.reference is None, "objective.reference", config.objective.reference, fix)


def _codec(codec: Codec, objective: Objective) -> None:
    require(codec.tail_samples >= 0, "codec.tail_samples", codec.tail_samples, "0 draws none")
    error = codec.max_overlap_error
    require(0 < error < 1, "codec.max_overlap_error", error, "give a number between 0 and 1")
    mass = codec.top_mass
    require(mass is None or 0 < mass < 1, "codec.top_mass", mass, "give a share of the mass between 0 and 1, or null")
    require(codec.bits in (8, 16), "codec.bits", codec.bits, "give 8 or 16")
    unfit = refusal(codec.kind.name, objective.divergence.name)
    refused = unfit if codec.kind is not Coding.auto else None  # it looks for one that can
    require(refused is None, "objective.divergence", objective.divergence.name, str(refused))


def _objective(objective: Objective) -> None:
    beta, eta, share = objective.beta, objective.eta, objective.hard_weight
    limits = (
        "give a number between 0 and 1, not these two; for their limits choose objective=forward_kl or objective=reverse_kl"
    )
    require(0 < beta < 1, "objective.beta", beta, limits)
    require(0 <= eta < math.inf, "objective.eta", eta, "give a number ≥ 0; 0 is forward KL alone")
    require(0 <= share <= 1, "objective.hard_weight", share, "give a number from 0 to 1")
    keep, selects = objective.keep, objective.reference is not None
    require(0 < keep <= 1, "objective.keep", keep, "give a share above 0 and up to 1")
    fix = "a share below 1 goes with objective.reference, the folder of a draft distilled before; 1.0 goes with none"
    require(selects == (keep < 1), "objective.keep", keep, fix)


def _logits(logits: Logits, stages: list[Stage]) -> None:
    for name in ("dry_run", "verify", "repair"):
        alone = not getattr(logits, name) or stages == [Stage.logits]
        require(alone, f"logits.{name}", "true", "it looks at the logits stage alone; add stages=[logits]")


def _draft(draft: Draft) -> None:
    named = bool(draft.layers or draft.path) or draft.kind is Drafting.medusa
    require(named, "draft.layers", draft.layers, "name layers of the target, or give draft.path")
    require(draft.vocabulary_size >= 0, "draft.vocabulary_size", draft.vocabulary_size, "0 keeps the whole vocabulary")
    whole = draft.width is None or (draft.path is None and bool(draft.layers))
    require(whole, "draft.width", draft.width, "a narrower draft is a new one: leave out draft.path, and say how many layers")
    coverage = draft.coverage
    require(coverage is None or 0 < coverage <= 1, "draft.coverage", coverage, "give a share above 0 and up to 1, or null")
    rank = draft.head_rank
    require(rank is None or rank > 0, "draft.head_rank", rank, "give a number above 0, or null for the full head")


def _medusa(config: Config) -> None:
    """What heads on the target cannot do, or cannot do without."""
    draft, codec, drafts = config.draft, config.codec.kind, config.decoding.draft_tokens
    needs = "Medusa heads learn from the target's hidden states; give codec=hidden"
    require(codec is Coding.hidden, "codec.kind", codec.name, needs)
    require(draft.heads > 0, "draft.heads", draft.heads, "give a number above 0")
    require(draft.path is None, "draft.path", draft.path, "Medusa heads begin at the target's own head; leave it out")
    require(draft.width is None, "draft.width", draft.width, "Medusa heads are as wide as the target; leave it out")
    fix = "Medusa heads read the target's own head, which is one matrix; leave it out"
    require(draft.head_rank is None, "draft.head_rank", draft.head_rank, fix)
    reference = config.objective.reference
    require(reference is None, "objective.reference", reference, "Medusa heads are trained on all positions; leave it out")
    fits = drafts is None or drafts <= draft.heads
    require(fits, "decoding.draft_tokens", drafts, f"draft.heads={draft.heads} heads draft no more tokens than that in a row")
    engine, form = config.export.with_gguf and Stage.export in config.stages, config.export.format.name
    fix = "llama.cpp has no Medusa heads; export.format=transformers writes safetensors, which Draftsmith's own engine reads"
    require(not engine, "export.format", form, fix)


def _optimizer(optimizer: Optimizer) -> None:
    for name in ("warmup_share", "decay_share", "final_share"):
        share = getattr(optimizer, name)
        require(0 <= share <= 1, f"optimizer.{name}", share, "give a number from 0 to 1")
    room = optimizer.schedule is not Schedule.wsd or optimizer.warmup_share + optimizer.decay_share <= 1
    require(room, "optimizer.decay_share", optimizer.decay_share, "give at most 1 − optimizer.warmup_share")
    betas = optimizer.betas
    require(len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "optimizer.betas", betas, "give two numbers in [0, 1)")


def _trainer(trainer: Trainer, objective: Objective) -> None:
    require(trainer.patience >= 0, "trainer.patience", trainer.patience, "0 never stops early")
    require((trainer.seed or 0) >= 0, "trainer.seed", trainer.seed, "give a number ≥ 0, or null to take seed")
    one = trainer.devices == trainer.num_nodes == 1
    fix = (
        f"with trainer.devices={trainer.devices} and trainer.num_nodes={trainer.num_nodes} it would begin the whole run in "
        "each process, and these would wait for one another; give ddp_spawn (or ddp_fork, on processors) and one node"
    )
    begun_here = trainer.strategy.endswith(("_spawn", "_fork")) and trainer.num_nodes == 1
    require(one or begun_here, "trainer.strategy", trainer.strategy, fix)
    fix = "the positions that count are chosen within a batch; give trainer.devices=1, or leave it out"
    require(one or objective.reference is None, "objective.reference", objective.reference, fix)


def _decoding(decoding: Decoding, generate: Generate) -> None:
    temperatures, fixed = decoding.temperatures, decoding.draft_tokens
    require(bool(temperatures), "decoding.temperatures", "[]", "give at least one temperature")
    require(all(t >= 0 for t in temperatures), "decoding.temperatures", temperatures, "temperatures are ≥ 0")
    missing = sorted(set(temperatures) - set(generate.temperatures))
    fix = "decoding needs text written at the same temperature: add it to generate.temperatures"
    require(not missing, "decoding.temperatures", missing, fix)
    fits = fixed is None or 0 < fixed <= decoding.longest_draft
    require(fits, "decoding.draft_tokens", fixed, "null lets calibration choose; else 1 … decoding.longest_draft")
    require(0 < decoding.top_p <= 1, "decoding.top_p", decoding.top_p, "give a number in (0, 1]")
    require(0 <= decoding.min_p <= 1, "decoding.min_p", decoding.min_p, "give a number from 0 to 1; 0 switches it off")
    require(decoding.top_k >= 0, "decoding.top_k", decoding.top_k, "0 switches it off")


def _compiled(config: Config) -> None:
    """What keeps forwards from being compiled."""
    for group in ("decoding", "trainer"):
        if not getattr(config, group).compile:
            continue
        key = f"{group}.compile"
        reason = "read states, which compiled forwards keep to themselves" if group == "decoding" else "are a few products"
        fix = f"Medusa heads {reason}; give {key}=false"
        require(config.draft.kind is not Drafting.medusa, key, True, fix)
        compiler = os.environ.get("CXX", "g++")
        fix = f"there is no C++ compiler {compiler}; install it, or give {key}=false"
        require(shutil.which(compiler) is not None, key, True, fix)


def _tree(config: Config) -> None:
    """Shapes that are no tree, and what a tree cannot do."""
    tree, rule = config.decoding.tree, config.decoding.verification
    listed = isinstance(tree, list) and bool(tree) and all(type(width) is int and width > 0 for width in tree)
    fix = 'give "off", auto, or the branches at every depth, such as [3,2,1]'
    require(tree in ("off", "auto") or listed, "decoding.tree", tree, fix)
    if tree == "off":
        return
    fix = "the branches of a tree are judged token by token; give token, or decoding.tree=off"
    require(rule in (Verification.token, Verification.typical), "decoding.verification", rule.name, fix)
    medusa, heads = config.draft.kind is Drafting.medusa, config.draft.heads
    fix = "trees are timed two levels deep, which takes two heads; give draft.heads=2 or more, or decoding.tree=off"
    require(not medusa or heads > 1, "draft.heads", heads, fix)
    if tree != "auto":
        nodes = sum(accumulate(tree, mul))
        require(nodes <= LARGEST_TREE, "decoding.tree", tree, f"it has {nodes} nodes, give up to {LARGEST_TREE}")
        fits = not medusa or len(tree) <= heads
        require(fits, "decoding.tree", tree, f"draft.heads={heads} heads draft no tree deeper than that")
        ids = config.draft.vocabulary_size if config.draft.coverage is None else 0
        fix = f"draft.vocabulary_size={ids} leaves the draft no more ids than that, give fewer branches at a node"
        require(ids == 0 or max(tree) <= ids, "decoding.tree", tree, fix)


def _typical(config: Config) -> None:
    """Thresholds that mean nothing, and where a lossy rule would pass for an exact one."""
    decoding, export = config.decoding, config.export
    for name in ("typical_epsilon", "typical_delta"):
        value = getattr(decoding, name)
        require(0 < value <= 1, f"decoding.{name}", value, "give a number above 0 and up to 1")
    if decoding.verification is not Verification.typical:
        return
    fix = "at temperature 0 it is the greedy rule, which is exact; give a temperature above 0 as well, or token"
    require(max(decoding.temperatures) > 0, "decoding.verification", "typical", fix)
    fix = "it is lossy, and export.lossless=true lets no lossy measurement pass; give token, or export.lossless=false"
    gated = Stage.export in config.stages and export.gate and export.lossless
    require(not gated, "decoding.verification", "typical", f"{fix}, or leave export out of stages")


def _drafters(config: Config) -> None:
    """What the comparison of drafters cannot begin with."""
    if Stage.drafters not in config.stages:
        return
    kind = config.draft.kind
    fix = "the comparison has a draft model and takes heads by drafters.heads; give draft.kind=model"
    require(kind is Drafting.model, "draft.kind", kind.name, fix)


def _export(export: Export) -> None:
    """Thresholds that no draft, or every draft, would pass by mistake."""
    overlap, ratio, memory = export.minimum_overlap, export.minimum_ratio, export.maximum_memory
    require(0 <= overlap <= 1, "export.minimum_overlap", overlap, "give a number from 0 to 1; 0 asks for nothing")
    require(0 <= ratio < float("inf"), "export.minimum_ratio", ratio, "give a number ≥ 0; 0 asks for nothing")
    require(memory is None or memory > 0, "export.maximum_memory", memory, "give MiB above 0, or null for no limit")
    plain = export.register is None or re.fullmatch(r"\w[\w.-]*", export.register) is not None
    require(plain, "export.register", export.register, "give a name of letters, digits, dots, dashes and underscores, or null")


def _gate(config: Config) -> None:
    """Too few prompts for the gate to judge a speed ratio by."""
    export, prompts = config.export, config.decoding.prompts
    judges = Stage.export in config.stages and export.gate and export.minimum_ratio > 0
    fix = f"the gate judges no speed ratio of so few; give {FEWEST_PROMPTS} or more, export.minimum_ratio=0 or export.gate=off"
    require(not judges or prompts >= FEWEST_PROMPTS, "decoding.prompts", prompts, fix)
