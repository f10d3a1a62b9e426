"""Stage generate: the target answers every prompt, in batches, at the temperatures of decoding.

Training prompts are answered once, evaluation prompts at every temperature. Each batch is one shard, written when it is
done, so a killed run goes on with the next; random numbers are keyed by row, so the bytes are the same.
"""

import shutil
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import speculative
from data.artifact import remove_partial
from data.responses import Request, Response, batches, read_shards, write_shard
from data.splits import read_split
from data.states import states_fault, states_file, write_states
from pipeline import existing, trainer
from pipeline.choices import Stage
from pipeline.config import Generate
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.tracking import Run

FORMAT = 3
EVALUATION = ("validation", "test")  # all that is answered where nothing is trained


def identity(context: Context) -> dict[str, Any]:
    return {
        "target": context.target.fingerprint,
        "precision": str(context.dtype),
        "system_prompt": context.config.target.system_prompt,
        "generate": asdict(context.config.generate),
        "seed": context.config.seed,
        **({"splits": list(EVALUATION)} if existing.as_it_is(context.config) else {}),
        **context.target.padding,
    }


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    remove_partial(folder)
    config = context.config.generate
    tokenizer = context.target.tokenizer()
    corpus = context.parent(Stage.corpus).folder
    requests, truncated = _requests(corpus, tokenizer, config, context.config.target.system_prompt)
    if existing.as_it_is(context.config):  # keys stay, and with them the answers
        requests = [request for request in requests if request.split in EVALUATION]
    work = list(enumerate(batches(requests, config.batch_size)))
    waiting = [(number, batch) for number, batch in work if not _finished(_shard(folder, number), config.keep_states)]
    started = time.perf_counter()
    if waiting:
        model = context.target.load(context.dtype)
        _check_context(model, requests, config)
        if config.keep_states:
            _check_disk(model, sum(len(batch) for _, batch in waiting) * config.max_new_tokens, folder)
        module = _Generator(model, folder, context, eos_token_ids(model, tokenizer))
        trainer.predict(context.config.trainer, folder, module, waiting)
    seconds = time.perf_counter() - started
    count = tokens = stopped = 0
    for response in read_shards(folder):
        count, tokens, stopped = count + 1, tokens + len(response.tokens), stopped + response.stopped
    details = {
        "responses": count,
        "response_tokens": tokens,
        "prompts_truncated": truncated,
        "stopped_by_themselves": stopped,
        "shards_written": len(waiting),
        "tokens_per_second": tokens * len(waiting) / max(len(work), 1) / max(seconds, 1e-9),
    }
    return {"generate/tokens_per_second": details["tokens_per_second"], "generate/response_tokens": tokens}, details


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a response: those of the generation config and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, system_prompt: str | None) -> list[int]:
    """The prompt in the target's chat template; plain text where it has none."""
    if tokenizer.chat_template is None:
        return tokenizer(text)["input_ids"]
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages = [*system, {"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def _requests(
    corpus: Path, tokenizer: PreTrainedTokenizerBase, config: Generate, system_prompt: str | None
) -> tuple[list[Request], int]:
    requests: list[Request] = []
    known: dict[int, int] = {}  # one object for equal ids
    truncated = 0
    for split in ("train", "validation", "test"):
        for place, prompt in enumerate(read_split(corpus / f"{split}.parquet")):
            ids = prompt_ids(tokenizer, prompt.text, system_prompt)
            if len(ids) > config.max_prompt_tokens:
                truncated += 1
                ids = ids[-config.max_prompt_tokens :]
            shared = tuple(map(known.setdefault, ids, ids))
            temperatures = [_share(place, config)] if split == "train" else config.temperatures
            for temperature in temperatures:
                requests.append(Request(len(requests), split, prompt.id, prompt.kind, temperature, shared))
    return requests, truncated


def _share(place: int, config: Generate) -> float:
    """The temperature of training prompt number ``place``: shares are met as evenly as whole prompts allow."""
    total, reached = sum(config.shares), 0.0
    point = (place * 0.6180339887498949) % 1.0
    for temperature, share in zip(config.temperatures, config.shares, strict=True):
        reached += share / total
        if point < reached:
            return temperature
    return config.temperatures[-1]


def _check_context(model: PreTrainedModel, requests: list[Request], config: Generate) -> None:
    longest = max(len(request.prompt) for request in requests) + config.max_new_tokens
    context = getattr(model.config, "max_position_embeddings", None)
    if context and longest > context:
        raise PipelineError(
            f"generate.max_prompt_tokens={config.max_prompt_tokens} and generate.max_new_tokens={config.max_new_tokens}: "
            f"the target's context holds {context} positions, these prompts need {longest}; lower one of the two"
        )


def _check_disk(model: PreTrainedModel, tokens: int, folder: Path) -> None:
    needed, free = tokens * model.config.hidden_size * model.dtype.itemsize, shutil.disk_usage(folder).free
    if needed > free:
        raise PipelineError(
            f"generate.keep_states=true: the states of {tokens:,} tokens take up to {needed / 1e9:.2f} GB and "
            f"{free / 1e9:.2f} GB are free; set generate.keep_states=false, or paths.work to a larger disk"
        )


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.parquet"


def _finished(shard: Path, with_states: bool) -> bool:
    """Whether a shard is there, and the states beside it, if they are kept, are whole."""
    return shard.is_file() and not (with_states and states_fault(states_file(shard)))


class _Generator(trainer.WithTarget):
    """One batch of requests in, one shard out."""

    def __init__(self, model: PreTrainedModel, folder: Path, context: Context, eos: list[int]) -> None:
        super().__init__(model, partial(context.target.load, context.dtype))
        self.folder, self.eos = folder, eos
        self.config, self.seed, self.ids = context.config.generate, context.config.seed, context.target.ids

    def predict_step(self, item: tuple[int, list[Request]]) -> int:
        number, batch = item
        done = speculative.generate(
            self.target,
            None,
            [request.prompt for request in batch],
            max_new_tokens=self.config.max_new_tokens,
            sampling=speculative.Sampling(batch[0].temperature),
            eos_token_ids=self.eos,
            vocabulary_size=self.ids,
            seed=self.seed,
            row_keys=[request.key for request in batch],
            states=self.config.keep_states,
        )
        shard = _shard(self.folder, number)
        if done.states is not None:  # first: a shard that is there is finished
            write_states(states_file(shard), [request.key for request in batch], done.states)
        rows = zip(batch, done.tokens, done.stopped, strict=True)
        write_shard(shard, (Response(r, tuple(t), stopped) for r, t, stopped in rows))
        return number
