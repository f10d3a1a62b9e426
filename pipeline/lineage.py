"""What stages read and make, as a store shows it: data from prompts to cache, and the draft from its cache to its export.

Everything has a name and the fingerprint of what it is, so that who reads a thing and who made it meet. How a store keeps
it is not known here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.choices import Source, Stage
from pipeline.context import Artifact, Context


@dataclass(frozen=True)
class Data:
    """A folder that a stage made for others to read; ``digest`` is its fingerprint, ``profile`` what there is to count."""

    name: str
    digest: str
    folder: str
    purpose: str
    profile: dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A draft as it was distilled, or an export of it. ``name`` holds its fingerprint."""

    name: str
    kind: str
    params: dict[str, str]
    tags: dict[str, str]


@dataclass(frozen=True)
class Things:
    """Data and models; of several models the draft comes first."""

    data: list[Data] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)

    @property
    def draft(self) -> Model | None:
        """The draft that they are about, if any."""
        return self.models[0] if self.models else None


def of(context: Context, artifacts: Iterable[Artifact]) -> Things:
    """What these results are to those who read them; results that nobody reads again are nothing."""
    found = {artifact.stage: artifact for artifact in artifacts}
    data = [_data(context, found[stage]) for stage in (Stage.corpus, Stage.generate, Stage.logits) if stage in found]
    models = [_draft(context, found[Stage.distil])] if Stage.distil in found else []
    return Things(data, models + ([_export(context, found[Stage.export])] if Stage.export in found else []))


def _data(context: Context, artifact: Artifact) -> Data:
    corpus, target = context.config.corpus, context.target.name if artifact.stage is not Stage.corpus else ""
    origin = corpus.source.name if corpus.source is Source.standard_library else str(corpus.path)
    name = {Stage.corpus: f"prompts {origin}", Stage.generate: f"responses {target}", Stage.logits: f"logits {target}"}
    purpose = "training" if artifact.stage is Stage.logits else "training and evaluation"
    return Data(name[artifact.stage][:500], artifact.fingerprint, str(artifact.folder), purpose, artifact.metrics)


def _draft(context: Context, artifact: Artifact) -> Model:
    config = context.config
    params = {
        "target": context.target.name,
        "objective": config.objective.divergence.name,
        **{name: str(value) for name, value in artifact.details["shape"].items()},
        "best_step": str(artifact.details["best_step"]),
    }
    return Model(f"draft-{artifact.fingerprint}", "draft", params, _tags(context, artifact, Stage.logits))


def _export(context: Context, artifact: Artifact) -> Model:
    params = {"format": context.config.export.format.name, "draft": f"draft-{context.parent(Stage.distil).fingerprint}"}
    return Model(f"export-{artifact.fingerprint}", "export", params, _tags(context, artifact, Stage.distil))


def _tags(context: Context, artifact: Artifact, parent: Stage) -> dict[str, str]:
    """A draft that is measured as it is was made from no cache."""
    source = context.artifacts.get(parent)
    own = context.config.export.path if artifact.stage is Stage.export else None
    folder = artifact.folder / "draft" if own is None else Path(own).expanduser().resolve()
    made_from = {"made_from": source.fingerprint} if source else {}
    return {"fingerprint": artifact.fingerprint, **made_from, "folder": str(folder)}
