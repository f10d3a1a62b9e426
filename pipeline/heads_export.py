"""What leaves the house of Medusa heads: safetensors, a config that names their target, and why no other engine gets them.

The files are read back and must be the trained heads, and the target must write with their help what it writes alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import speculative
from data.artifact import write_json
from pipeline import card, lossy
from pipeline.choices import Stage
from pipeline.context import Context
from pipeline.errors import PipelineError
from speculative import MedusaHeads, medusa

PROMPTS, NEW_TOKENS = 3, 32  # greedy answers that are compared

SERVE = """# Serving the heads

`TARGET` stands for the target model, `HEADS` for this folder. The heads read the last hidden state of this target alone;
`medusa.json` names it by the fingerprint of its files.

## Draftsmith's engine: measured

```python
from pathlib import Path

import speculative
from speculative import medusa

heads = medusa.load(Path("HEADS"), "{fingerprint}", target.dtype)
speculative.generate(target, heads, ["A queue is"], tokenizer=tokenizer, max_new_tokens=64, num_draft_tokens={length})
```
{lossy}
## transformers: not possible

Its assisted generation takes a model of its own as assistant; heads are none.

## llama.cpp: not possible

It has no Medusa heads, and the GGUF format no names for them.

## vLLM, SGLang, TensorRT-LLM: not written

Their Medusa loaders take weights under other names and an output matrix for each head, where these heads share one. Nothing
here could read such files to prove them, so none are written.
"""


def write(context: Context, heads: MedusaHeads, evidence: dict[str, Any], length: int, folder: Path) -> None:
    """Fill ``folder``; K = ``length`` is what was measured."""
    medusa.save(heads, folder, context.target.fingerprint)
    (folder / "README.md").write_text(card.model_card(context, None), encoding="utf-8")
    loss = lossy.of(context.parent(Stage.speculate).details["by_temperature"])
    said = (
        f"\nThis call is exact. What was measured at temperature {', '.join(loss)} is lossy (see README.md).\n" if loss else ""
    )
    text = SERVE.format(fingerprint=context.target.fingerprint, length=length, lossy=said)
    (folder / "serve.md").write_text(text, encoding="utf-8")
    write_json(folder / "gate.json", evidence)


def prove(context: Context, heads: MedusaHeads, folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, bool]:
    """Compare the files in ``folder`` with the trained ``heads``, and answers to a few ``prompts`` with and without them.

    Raises:
        PipelineError: they differ.
    """
    again = medusa.load(folder, context.target.fingerprint, torch.float32)
    ours, theirs = heads.state_dict(), again.state_dict()
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
        raise PipelineError("export: the files that were written do not hold the trained heads")
    target = context.target.load(torch.float32)
    plain, helped = (
        speculative.generate(target, one, prompts[:PROMPTS], max_new_tokens=NEW_TOKENS).tokens for one in (None, again)
    )
    if plain != helped:
        raise PipelineError("export: these heads change the target's greedy output")
    return {"same_weights": True, "same_output": True}
