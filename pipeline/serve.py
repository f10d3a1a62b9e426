"""serve.md: how each engine is told to use the exported draft, and which of it was measured here.

The words of other engines are from their documentation; a command that was not run says so.
"""

import json
from dataclasses import dataclass
from typing import Any

from pipeline import engine_rules
from pipeline.config import Export
from pipeline.engine_rules import Verdict

GGUF = "draft.gguf"


@dataclass(frozen=True)
class Facts:
    """What the sections must not overstate: ``verdicts`` of vLLM and SGLang, the number format that was timed, and whether
    the draft's GGUF vocabulary was compared with one in a GGUF file of the target."""

    verdicts: dict[str, Verdict]
    precision: str
    target_in_gguf: bool


def instructions(export: Export, by_temperature: dict[str, Any], facts: Facts) -> str:
    """Markdown with one section an engine. K is that of the first temperature measured."""
    length = next(iter(by_temperature.values()))["draft_tokens"]
    sections = (
        _transformers(export, by_temperature, length, facts.precision),
        _servers(export, length, facts.verdicts),
        _llama_cpp(export, length, facts.target_in_gguf),
    )
    return "\n".join([HEADER, *sections])


HEADER = """# Serving the draft

`TARGET` stands for the target model, `DRAFT` for this folder.
"""


def _transformers(export: Export, by_temperature: dict[str, Any], length: int, precision: str) -> str:
    file = f', gguf_file="{GGUF}"' if not export.with_transformers else ""
    return f"""## transformers: {_measured(by_temperature)}

{_how_it_was_timed(by_temperature, precision)}```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("TARGET")
target = AutoModelForCausalLM.from_pretrained("TARGET")
draft = AutoModelForCausalLM.from_pretrained("DRAFT"{file})
draft.generation_config.num_assistant_tokens = {length}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.0
inputs = tokenizer("A queue is", return_tensors="pt")
print(tokenizer.decode(target.generate(**inputs, assistant_model=draft, max_new_tokens=64)[0]))
```
"""


def _measured(by_temperature: dict[str, Any]) -> str:
    """What the run itself timed: transformers assisted by the same weights, against transformers alone."""
    timed = {t: e for t, e in by_temperature.items() if "ratio_assisted" in e}
    if not timed:
        return "output checked, speed not measured"
    ratios = (
        f"{e['ratio_transformers']['median'] / e['ratio_assisted']['median']:.2f}× at temperature {t}" for t, e in timed.items()
    )
    return f"measured, {', '.join(ratios)} (ratio of medians of the time without and with the draft)"


def _how_it_was_timed(by_temperature: dict[str, Any], precision: str) -> str:
    """What those models were and the ones that are loaded below are not."""
    if not any("ratio_assisted" in entry for entry in by_temperature.values()):
        return ""
    packed = " with weights packed for this processor (`speculative.pack`)" if precision == "float32" else ""
    return (
        f"Both models were {precision}{packed} when they were timed. The lines below load plain ones, which were not timed.\n\n"
    )


def _checked(verdict: Verdict) -> str:
    if verdict.refusal is None:
        return f"not run; accepted by {verdict.by}"
    return f"not run; refused by {verdict.by}: {verdict.refusal}"


def _servers(export: Export, length: int, verdicts: dict[str, Verdict]) -> str:
    if not export.with_transformers:
        return "## vLLM, SGLang, OpenVINO GenAI: not run\n\nThey read safetensors; export with export.format=both.\n"
    flags = " \\\n    ".join(f"--{name} {value}" for name, value in engine_rules.sglang(length).items())
    return f"""## vLLM: {_checked(verdicts["vLLM"])}

```console
vllm serve TARGET --speculative-config '{json.dumps(engine_rules.vllm(length))}'
```

Both models need the same tensor-parallel size; text beyond the shorter of their contexts is written without drafts.

## SGLang: {_checked(verdicts["SGLang"])}

```console
python -m sglang.launch_server --model-path TARGET \\
    {flags}
```

It takes such drafts without data-parallel attention only.

## OpenVINO GenAI: not run

```console
optimum-cli export openvino --model TARGET target-openvino
optimum-cli export openvino --model DRAFT draft-openvino
```

```python
import openvino_genai

draft = openvino_genai.draft_model("draft-openvino", "CPU")
pipe = openvino_genai.LLMPipeline("target-openvino", "CPU", draft_model=draft)
print(pipe.generate("A queue is", max_new_tokens=64, num_assistant_tokens={length}))
```
"""


def _llama_cpp(export: Export, length: int, target_in_gguf: bool) -> str:
    if not export.with_gguf:
        return "## llama.cpp: not run\n\nIt reads GGUF; export with export.format=gguf or both.\n"
    if target_in_gguf:
        compared = "The draft's vocabulary was compared with that of the target's GGUF file by llama.cpp's rules."
    else:
        compared = (
            "The target was no GGUF file, so no two vocabularies were compared: the draft's was made from the target's "
            "tokenizer, and the target's GGUF file must be made from the same one."
        )
    return f"""## llama.cpp: not run

```console
llama-server -m TARGET.gguf -md DRAFT/{GGUF} --spec-type draft-simple --spec-draft-n-max {length}
```

Builds without `--spec-type` call the last one `--draft-max`; newer ones draft nothing unless they are told the type.
{compared}
"""
