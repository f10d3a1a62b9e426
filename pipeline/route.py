"""Who needs whom: the stages that a stage reads, and all that the wanted stages rest on.

Nothing is run here, and nothing is known of results: whether one is there, the flow finds out.
"""

from pipeline import existing
from pipeline.choices import Stage
from pipeline.config import Config

PARENTS: dict[Stage, tuple[Stage, ...]] = {
    Stage.corpus: (),
    Stage.generate: (Stage.corpus,),
    Stage.logits: (Stage.generate,),
    Stage.distil: (Stage.logits, Stage.generate),
    Stage.calibrate: (Stage.generate,),
    Stage.speculate: (Stage.calibrate, Stage.distil, Stage.generate),
    Stage.report: (Stage.speculate, Stage.calibrate, Stage.distil, Stage.logits, Stage.generate, Stage.corpus),
    Stage.export: (Stage.speculate, Stage.distil, Stage.generate),
    Stage.drafters: (Stage.distil, Stage.generate, Stage.corpus),
}


def parents(stage: Stage, config: Config) -> tuple[Stage, ...]:
    """What a stage reads. A draft that is measured as it is has learnt from no cache."""
    return tuple(p for p in PARENTS[stage] if p is not Stage.logits or not existing.as_it_is(config))


def ancestors(wanted: list[Stage], config: Config) -> list[Stage]:
    """The wanted stages and all that they rest on, in running order."""
    needed: set[Stage] = set()
    waiting = list(wanted)
    while waiting:
        stage = waiting.pop()
        if stage not in needed:
            needed.add(stage)
            waiting.extend(parents(stage, config))
    return [stage for stage in Stage if stage in needed]
