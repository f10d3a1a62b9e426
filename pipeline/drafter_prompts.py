"""The prompts that drafters are compared on: chat prompts that were held out, code to complete, and a file by category.

Each is answered plainly first: every way of decoding then writes as many tokens as the target's own answer has.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import speculative
from data import sources, standard_library
from data.prompts import CorpusError
from data.responses import Response
from data.splits import read_split
from pipeline.choices import Source, Stage
from pipeline.comparison import ALL
from pipeline.config import Drafters
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.generate import eos_token_ids
from pipeline.plan import SHORTEST
from pipeline.requests import prompt_ids
from pipeline.spread import spread
from speculative import Sampling

CHAT, CODE = "chat", "code completion"
OWN = (CHAT, CODE, ALL)  # kinds that no category of a file may be taken for
BATCH = 8
# Spec-Bench reports the eight categories of MT-bench as one task (Xia et al., 2401.07851).
MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
CONVERSATION = "conversation (MT-bench)"


@dataclass(frozen=True)
class Case:
    """A prompt of one kind as ids, to be continued by ``new_tokens``; ``key`` names its random numbers."""

    kind: str
    prompt: tuple[int, ...]
    key: int
    new_tokens: int = 0


def room(positions: int | None, new_tokens: int) -> int:
    """The most tokens of a prompt that leave ``new_tokens`` of a context's ``positions``, None being no limit.

    Raises:
        PipelineError: no prompt does.
    """
    left = sys.maxsize if positions is None else positions - new_tokens
    if left < 1:
        fix = f"the context holds {positions} positions, which leaves none for a prompt; lower it"
        raise PipelineError(f"decoding.max_new_tokens={new_tokens}: {fix}")
    return left


def gather(context: Context, answers: Sequence[Response], most: int) -> list[Case]:
    """As many prompts of each kind as ``drafters.prompts`` says; ``answers`` are those to the test prompts.

    Prompts of more than ``most`` tokens are passed over; code loses its beginning.

    Raises:
        PipelineError: no prompt is left.
    """
    config, tokenizer = context.config.drafters, context.target.tokenizer()
    longest = min(config.max_prompt_tokens, most)
    found = {CHAT: [answer.request.prompt for answer in answers if len(answer.request.prompt) <= most]}
    found[CODE] = [tuple(tokenizer(text)["input_ids"][-longest:]) for text in _code(context)]
    if config.path is not None:
        found |= of_file(config, tokenizer, context.config.target.system_prompt, longest)
    chosen = [(kind, prompt) for kind, prompts in found.items() for prompt in spread(prompts, config.prompts)]
    if not chosen:
        raise PipelineError(
            f"drafters.path={config.path}: no prompt has {longest} tokens or fewer; name a file of shorter ones"
        )
    return [Case(kind, tuple(prompt), key) for key, (kind, prompt) in enumerate(chosen)]


def _code(context: Context) -> list[str]:
    """Code of modules that training never saw."""
    corpus = context.parent(Stage.corpus).folder
    if context.config.corpus.source is Source.standard_library:
        names = {prompt.source for prompt in read_split(corpus / "test.parquet")}
    else:
        names = {prompt.source for prompt in standard_library.read()[0]}
    return standard_library.beginnings(names)


def of_file(
    config: Drafters, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None, longest: int
) -> dict[str, list[Sequence[int]]]:
    """Ids of the prompts of ``drafters.path`` that have up to ``longest``, by kind; none goes by the name of another kind.

    Raises:
        PipelineError: the file cannot be read, lacks a column, or has no prompt so short.
    """
    try:
        prompts, _ = sources.read(str(config.path), column=config.column, document_column=config.category)
    except CorpusError as error:
        message = str(error).replace("corpus.document_column", "drafters.category").replace("corpus.", "drafters.")
        raise PipelineError(message) from error
    found: dict[str, list[Sequence[int]]] = defaultdict(list)
    whole = {prompt.source for prompt in prompts} >= MT_BENCH
    for prompt in prompts:
        ids = prompt_ids(tokenizer, prompt.text, system_prompt)
        if len(ids) <= longest:
            kind = CONVERSATION if whole and prompt.source in MT_BENCH else prompt.source
            found[f"{kind} (of the file)" if kind in OWN else kind].append(ids)
    if not found:
        place = f"drafters.max_prompt_tokens={config.max_prompt_tokens}: no prompt of {Path(config.path).name}"
        raise PipelineError(f"{place} has {longest} tokens or fewer, which is what fits")
    return found


def answered(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[Case],
    longest: int,
    sampling: Sampling,
    seed: int,
    ids: int | None = None,
) -> list[Case]:
    """The cases whose answer is long enough to be timed, each with its length, up to ``longest`` tokens.

    Raises:
        PipelineError: none is.
    """
    eos, found = eos_token_ids(target, tokenizer), []
    for first in track(range(0, len(cases), BATCH), description=f"{'answers':<28}", transient=True):
        some = cases[first : first + BATCH]
        done = speculative.generate(
            target,
            None,
            [case.prompt for case in some],
            max_new_tokens=longest,
            sampling=sampling,
            eos_token_ids=eos,
            seed=seed,
            row_keys=[case.key for case in some],
            vocabulary_size=ids,
        )
        found += [Case(case.kind, case.prompt, case.key, len(tokens)) for case, tokens in zip(some, done.tokens, strict=True)]
    kept = [case for case in found if case.new_tokens >= min(SHORTEST, longest)]
    if not kept:
        raise PipelineError(
            f"decoding.max_new_tokens={longest}: no answer to the prompts of the comparison has {SHORTEST} tokens; "
            "raise drafters.prompts or name another drafters.path"
        )
    return kept
