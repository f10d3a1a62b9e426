"""What travels with an exported draft: a model card and its provenance. No paths, no environment, no secrets."""

from importlib.metadata import version
from typing import Any

from pipeline import tables
from pipeline.config import Stage
from pipeline.context import Context
from pipeline.hardware import machine

PACKAGES = ("torch", "transformers", "lightning", "datasets", "mlflow")


def model_card(context: Context) -> str:
    """A Hugging Face model card with the measured figures."""
    name = context.target.name
    entries = context.parent(Stage.speculate).details["by_temperature"]
    length = next(iter(entries.values()))["draft_tokens"]
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, draft-model]
---

# Draft model for {name}

A small model that proposes tokens for `{name}` in speculative decoding. Alone it writes poor text; with its target the
output is the target's own. Distilled and measured by Draftsmith. The license of the target applies.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("PATH_OF_THE_TARGET")
draft = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER")
draft.generation_config.num_assistant_tokens = {length}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.0
tokenizer = AutoTokenizer.from_pretrained("PATH_OF_THIS_FOLDER")
inputs = tokenizer("A queue is", return_tensors="pt")
print(tokenizer.decode(target.generate(**inputs, assistant_model=draft, max_new_tokens=64)[0]))
```

## Measured

On {facts}; {str(context.dtype).removeprefix("torch.")}, one prompt at a time.

{tables.markdown(tables.summary(context))}
Tokens outside the draft's vocabulary are never proposed in practice: their head rows push their logits far below.
Figures hold for prompts like those of the run; other domains agree less.
"""


def provenance(context: Context) -> dict[str, Any]:
    """Fingerprints of every stage, versions, and the settings that shaped the draft."""
    return {
        "target": {"name": context.target.name, "fingerprint": context.target.fingerprint},
        "stages": {stage.name: artifact.fingerprint for stage, artifact in context.artifacts.items()},
        "versions": {package: version(package) for package in PACKAGES},
        "machine": machine(),
    }
