"""Stage generate: the target answers every prompt, in batches, at the temperatures of decoding.

Each batch is one shard, written when it is done, so a killed run goes on with the next; random numbers are keyed by row, so
the bytes are the same. Answers that came with the prompts are read by the target and kept as if it had written them; prompts
that it is to write itself it writes first.
"""

import shutil
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import speculative
from data.artifact import remove_partial
from data.responses import Request, Response, batches, read_shards, write_shard
from data.states import states_fault, states_file, write_states
from pipeline import existing, trainer
from pipeline.choices import Stage, Text
from pipeline.config import Generate, Regime
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.forward import forward
from pipeline.requests import Asked, asked, seed_requests
from pipeline.tracking import Run

FORMAT = 3
EVALUATION = ("validation", "test")  # all that is answered where nothing is trained
SEEDS = "seeds"  # the folder of prompts that the target wrote itself
SEED_TOKENS = 96  # of such a prompt at most
CHUNK = 16  # given answers that are read at once


def identity(context: Context) -> dict[str, Any]:
    return {
        "target": context.target.fingerprint,
        "precision": str(context.dtype),
        "system_prompt": context.config.target.system_prompt,
        "generate": asdict(context.config.generate),
        "seed": context.config.seed,
        **_regime(context.config.regime),
        **({"splits": list(EVALUATION)} if existing.as_it_is(context.config) else {}),
        **context.target.padding,
    }


def _regime(regime: Regime) -> dict[str, Any]:
    """What a regime changes here; rollouts begin behind this stage."""
    if regime.kind not in (Text.corpus, Text.seeds):
        return {}
    return {"regime": {"kind": regime.kind.name, "share": regime.share}}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    remove_partial(folder)
    config = context.config.generate
    found = _asked(context, folder)
    work = list(enumerate([*batches(found.requests, config.batch_size), *_read_together(found.given, config.batch_size)]))
    waiting = [(number, batch) for number, batch in work if not _finished(_shard(folder, number), config.keep_states)]
    started = time.perf_counter()
    if waiting:
        model = context.target.load(context.dtype)
        _check_context(model, [*found.requests, *(response.request for response in found.given)], config)
        if config.keep_states:
            _check_disk(model, sum(len(batch) for _, batch in waiting) * config.max_new_tokens, folder)
        trainer.predict(context.config.trainer, folder, _Generator(model, folder, context, config), waiting)
    seconds = time.perf_counter() - started
    count = tokens = stopped = 0
    for response in read_shards(folder):
        count, tokens, stopped = count + 1, tokens + len(response.tokens), stopped + response.stopped
    details = {
        "responses": count,
        "response_tokens": tokens,
        "prompts_truncated": found.truncated,
        "prompts_without_answer": found.dropped,
        "given_responses": len(found.given),
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


def _asked(context: Context, folder: Path) -> Asked:
    """What is to be answered, and what was given; prompts that the target writes itself are written here."""
    config, tokenizer, corpus = context.config, context.target.tokenizer(), context.parent(Stage.corpus).folder
    if existing.as_it_is(config):  # keys stay, and with them the answers
        found = asked(corpus, tokenizer, replace(config, regime=Regime()))
        return replace(found, requests=[request for request in found.requests if request.split in EVALUATION])
    if config.regime.kind is not Text.seeds:
        return asked(corpus, tokenizer, config)
    place, turn = folder / SEEDS, replace(config.generate, max_new_tokens=SEED_TOKENS, keep_states=False)
    work = list(enumerate(batches(seed_requests(corpus, tokenizer, config), turn.batch_size)))
    waiting = [(number, batch) for number, batch in work if not _finished(_shard(place, number), False)]
    if waiting:
        module = _Generator(context.target.load(context.dtype), place, context, turn)
        trainer.predict(config.trainer, folder, module, waiting)
    return asked(corpus, tokenizer, config, list(read_shards(place)))


def _read_together(given: list[Response], size: int) -> list[list[Response]]:
    """Batches of answers of similar length, longest first."""
    ordered = sorted(given, key=lambda response: (-response.length, response.request.key))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


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
    """One batch of requests, or of answers that are given, in, one shard out."""

    def __init__(self, model: PreTrainedModel, folder: Path, context: Context, config: Generate) -> None:
        super().__init__(model, partial(context.target.load, context.dtype))
        self.folder, self.eos = folder, eos_token_ids(model, context.target.tokenizer())
        self.config, self.seed, self.ids = config, context.config.seed, context.target.ids

    def predict_step(self, item: tuple[int, list[Request] | list[Response]]) -> int:
        number, batch = item
        if isinstance(batch[0], Response):
            self._read(_shard(self.folder, number), batch)
            return number
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

    def _read(self, shard: Path, batch: list[Response]) -> None:
        if self.config.keep_states:
            size = CHUNK
            states = [part for i in range(0, len(batch), size) for part in forward(self.target, batch[i : i + size], True)]
            write_states(states_file(shard), [response.request.key for response in batch], states)
        write_shard(shard, batch)
