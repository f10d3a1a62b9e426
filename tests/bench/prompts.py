"""The prompts that benchmarks decode, as ids: of a run's test split, of the standard library, of a file."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data import standard_library
from data.responses import read_shards
from pipeline.requests import prompt_ids

LONGEST = 256  # ids of a prompt that are kept, its end


def held_out(answers: Path, count: int) -> list[list[int]]:
    """``count`` test prompts of a generate stage's result."""
    requests = (one.request for one in read_shards(answers) if one.request.split == "test")
    unique = list({request.prompt_id: list(request.prompt)[-LONGEST:] for request in requests}.values())
    return unique[:: max(1, len(unique) // count)][:count]


def ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return [prompt_ids(tokenizer, text, None)[-LONGEST:] for text in texts]


def read(path: Path | None, count: int) -> list[str]:
    """``count`` texts spread over the file, or over the standard library."""
    if path is None:
        texts = [prompt.text for prompt in standard_library.read()[0]]
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
    return texts[:: max(1, len(texts) // count)][:count]
