"""Stage logits: the target's distributions over the responses, encoded, at the positions that predict response tokens only.

Training text and validation text (at each temperature) lie in folders of their own; validation keeps more of each
distribution, and nothing drawn, because overlap is estimated from it. Finished shards are checked before they are kept.
"""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from data.artifact import fingerprint, remove_partial, write_json
from data.codec import describe
from data.hidden import BLOCK, HEAD, Hidden
from data.logit_cache import write_head
from data.responses import Response
from data.shards import Seal, fault
from pipeline import rehearsal, trainer
from pipeline.choice import choose
from pipeline.choices import Coding, Text
from pipeline.coding import SPARE_BYTES, Parts, estimate, in_order, kept_states, parts, responses
from pipeline.config import Codec, Config
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.rollouts import Roller
from pipeline.teacher import ROLLOUTS, Teacher, Work, check_plain_head, head_of
from pipeline.tracking import Run
from pipeline.undistilled import draft_identity, initial

FORMAT = 7
CHOICE = "codec.json"  # what codec=auto settled on
SAMPLE = 8  # held-out rows kept dense to measure fidelity
NAMED = 40  # bad shards that a message names; it must end with the remedy on a screen
DISTRIBUTION = "softmax of the logits at temperature 1, without filters, whatever wrote the text"

log = logging.getLogger("draftsmith")


def identity(context: Context) -> dict[str, Any]:
    codec = context.config.codec
    settings = {key: value for key, value in asdict(codec).items() if value is not None}
    if codec.kind in (Coding.hidden, Coding.auto):
        settings["block"] = BLOCK
    may_draw = codec.draws or codec.kind is Coding.auto
    chosen_for = {"objective": context.config.objective.divergence.name} if codec.kind is Coding.auto else {}
    return {
        "target": context.target.fingerprint,
        "precision": str(context.dtype),
        **context.target.padding,
        "distribution": DISTRIBUTION,
        "codec": settings | {"kind": codec.kind.name},
        "seed": context.config.seed if may_draw else None,
        **chosen_for,
        **_rolled(context.config),
    }


def _rolled(config: Config) -> dict[str, Any]:
    """What shapes the text that a draft continues; how often training meets it shapes nothing here."""
    if config.regime.kind is not Text.rollouts:
        return {}
    regime = {name: getattr(config.regime, name) for name in ("starts", "length")}
    return {"rollouts": regime | {"draft": draft_identity(config.draft), "seed": config.seed}}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    remove_partial(folder)
    model, rows, ids = context.target.load(context.dtype), responses(context), context.target.ids
    groups = parts(_settled(context, folder, rows, lambda: model), rows)
    estimated = estimate(groups, model, context.config)
    _check_disk(folder, estimated)
    work = _work(context, groups, folder)
    _write(context, folder, model, work, _bad(work, folder))
    files = [item.path for item in work] + ([folder / HEAD] if _needs_head(work) else [])
    total = sum(path.stat().st_size for path in files)
    positions = sum(len(r.tokens) for rows, _ in groups.values() for r in rows)
    train = sum(item.path.stat().st_size for item in work if item.folder.name == "train")
    details = {
        "positions": positions,
        "bytes": total,
        "bytes_estimated": estimated,
        "bytes_per_position": total / max(positions, 1),
        "ids": fingerprint([item.metadata.get("ids", item.metadata.get("trunks")) for item in work]),
        "codec": describe(groups["train"][1]),
        "train_bytes_per_token": train / max(sum(len(r.tokens) for r in groups["train"][0]), 1),
        "rows": {name: len(rows) for name, (rows, _) in groups.items()},
    }
    metrics = {"logits/bytes_per_position": details["bytes_per_position"], "logits/positions": positions}
    sample = [r for name, (rows, _) in groups.items() if name not in ("train", ROLLOUTS) for r in rows][:SAMPLE]
    if sample:
        states = kept_states(context, model)
        details["fidelity"] = asdict(rehearsal.fidelity(model, [groups["train"][1]], sample, states, ids)[0])
        metrics |= {f"logits/{name}": value for name, value in details["fidelity"].items() if name != "positions"}
    return metrics, details


def inspect(context: Context, folder: Path) -> None:
    """Check a finished cache; with ``logits.repair`` write what is bad again.

    Raises:
        PipelineError: naming the bad shards, if they are not to be repaired.
    """
    rows = responses(context)
    groups = parts(_settled(context, folder, rows, lambda: context.target.load(context.dtype)), rows)
    work = _work(context, groups, folder)
    bad = _bad(work, folder)
    if not bad:
        log.info("logits: all %d shards are whole (%s)", len(work), folder.name)
    elif context.config.logits.repair:
        remove_partial(folder)
        _write(context, folder, context.target.load(context.dtype), work, bad)
        log.info("logits: wrote %s again", ", ".join(str(path.relative_to(folder)) for path in bad))
    else:
        named = [*bad.values()][:NAMED]
        others = [f"and {len(bad) - NAMED} more"] if len(bad) > NAMED else []
        raise PipelineError("logits.verify: " + "\n".join([*named, *others, "write them again with logits.repair=true"]))


def _settled(context: Context, folder: Path, rows: list[Response], load: Callable[[], PreTrainedModel]) -> Config:
    """The configuration with ``codec=auto`` replaced by what was chosen; the choice is kept, so that a resumed run has it."""
    config = context.config
    if config.codec.kind is not Coding.auto:
        return config
    kept = folder / CHOICE
    if not kept.is_file():
        model = load()
        codec = choose(config, model, rows, kept_states(context, model), context.target.ids)
        write_json(kept, asdict(codec) | {"kind": codec.kind.name})
    chosen = json.loads(kept.read_text())
    return replace(config, codec=Codec(**chosen | {"kind": Coding[chosen["kind"]]}))


def _work(context: Context, groups: Parts, folder: Path) -> list[Work]:
    items = []
    for name, (rows, codec) in groups.items():
        batches = _batches(rows, context.config.codec.batch_size)
        for number, batch in enumerate(batches):
            seal = Seal(folder.name, name, number, len(batches), codec, context.target.ids)
            items.append(Work(folder / name, seal, batch))
    return items


def _bad(work: list[Work], folder: Path) -> dict[Path, str]:
    """What is wrong with each file that is not there or not whole."""
    found = {item.path: fault(item.path, item.metadata) for item in work}
    if _needs_head(work):
        found[folder / HEAD] = fault(folder / HEAD, {"cache": folder.name})
    return {path: why for path, why in found.items() if why}


def _needs_head(work: list[Work]) -> bool:
    return any(isinstance(item.seal.codec, Hidden) for item in work)


def _write(context: Context, folder: Path, model: PreTrainedModel, work: list[Work], bad: dict[Path, str]) -> None:
    """Write the files of ``work``, and the head, that ``bad`` names."""
    if _needs_head(work):
        check_plain_head(model)
    if folder / HEAD in bad:
        write_head(folder, folder.name, *head_of(model, context.target.ids))
    waiting = [item for item in work if item.path in bad]
    if waiting:
        load = partial(context.target.load, context.dtype)
        teacher = Teacher(
            model, kept_states(context, model), load, _roller(context) if any(w.rolled for w in waiting) else None
        )
        trainer.predict(context.config.trainer, folder, teacher, waiting)


def _roller(context: Context) -> Roller:
    regime = context.config.regime
    draft, _ = initial(context)
    draft.model.to(context.dtype)
    return Roller(draft, regime.starts, regime.length, context.config.seed)


def _batches(rows: list[Response], count: int) -> list[list[Response]]:
    ordered = in_order(rows)
    return [ordered[i : i + count] for i in range(0, len(ordered), count)]


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise PipelineError(
            f"paths.work: the logits cache needs about {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "lower codec.top_k or corpus.train, or set paths.work to a larger disk"
        )
