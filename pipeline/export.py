"""Stage export: a folder that transformers loads without remote code, compared with the trained draft before it counts.

The head is expanded to the target's vocabulary and the target's tokenizer goes along. The folder appears by a rename,
after the reloaded model gave the trained draft's logits on held-out text.
"""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from data.artifact import publish_folder, write_json
from data.responses import Response, read_shards
from pipeline import card
from pipeline import draft as drafts
from pipeline.config import Stage
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.expand import Expansion, expand
from pipeline.tracking import Run
from speculative import Draft

FORMAT = 1
TOLERANCE = 1e-4  # largest difference of float32 logits between the trained draft and its export
TEXTS = 16  # held-out texts that the comparison reads


def identity(context: Context) -> dict[str, Any]:
    return {"path": context.config.export.path}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    destination = free_destination(context.config.export.path) or folder / "draft"
    responses = [r for r in read_shards(context.parent(Stage.generate).folder) if r.tokens]
    trained = drafts.load(context.parent(Stage.distil).folder / "draft", torch.float32)
    expansion = expand(trained, ([*r.request.prompt, *r.tokens] for r in responses if r.request.split == "validation"))
    comparison: dict[str, float] = {}

    def fill(temporary: Path) -> None:
        _write(context, expansion, temporary)
        comparison.update(_compare(temporary, trained, [r for r in responses if r.request.split == "test"][:TEXTS]))

    destination.parent.mkdir(parents=True, exist_ok=True)
    publish_folder(destination, fill)
    return {f"export/{name}": value for name, value in comparison.items()}, {
        "folder": os.path.relpath(destination),
        **comparison,
    }


def free_destination(path: str | None) -> Path | None:
    """The folder to export to, None for the default; refused if something is there, which is not ours to replace."""
    destination = Path(path).expanduser().resolve() if path else None
    if destination is not None and destination.exists():
        raise PipelineError(f"export.path={path}: this folder exists; move it away or choose another")
    return destination


def _write(context: Context, expansion: Expansion, folder: Path) -> None:
    model, tokenizer = expansion.model, context.target.tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card.model_card(context))
    write_json(folder / "provenance.json", card.provenance(context))


def _compare(folder: Path, trained: Draft, texts: list[Response]) -> dict[str, float]:
    """Reload the folder and compare it with the trained draft.

    Raises:
        PipelineError: a kept logit differs by more than TOLERANCE.
    """
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    worst = mass = 0.0
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([[*text.request.prompt, *text.tokens]])
            exported, ours = reloaded(input_ids=ids).logits[0], trained.model(input_ids=ids).logits[0]
            kept = exported if trained.vocabulary is None else exported[:, trained.vocabulary]
            worst = max(worst, float((kept - ours).abs().max()))
            inside = (kept.logsumexp(-1) - exported.logsumexp(-1)).exp()
            mass = max(mass, float(1 - inside.min()))
    if worst > TOLERANCE:
        raise PipelineError(
            f"export: the reloaded draft's logits differ from the trained draft's by {worst:.2e} (> {TOLERANCE})"
        )
    return {"largest_logit_difference": worst, "excluded_mass": mass}
