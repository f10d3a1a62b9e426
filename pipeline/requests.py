"""What the target is asked, and the text that training takes from elsewhere: answers that came with the prompts, and
prompts that the target wrote itself.

Training prompts are asked once, evaluation prompts at every temperature. A share of the training prompts gets text from
elsewhere, as evenly as whole prompts allow. Nothing is generated here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.prompts import Prompt
from data.responses import Request, Response
from data.splits import read_split
from pipeline.choices import Text
from pipeline.config import Config
from pipeline.errors import PipelineError

GOLDEN, SILVER = 0.6180339887498949, 0.41421356237309515  # their multiples spread evenly over a unit, each its own way
MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for a user's text where a template is taken apart
SEED = "seed"  # the kind and the split of a prompt that the target wrote
SEED_KEYS = 1 << 32  # begins the keys of these, far from those of answers


@dataclass(frozen=True)
class Asked:
    """``requests`` to answer, and ``given`` answers; how many prompts were cut, and dropped for want of a given answer."""

    requests: list[Request]
    given: list[Response]
    truncated: int
    dropped: int


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, system_prompt: str | None) -> list[int]:
    """The prompt in the target's chat template; plain text where it has none."""
    if tokenizer.chat_template is None:
        return tokenizer(text)["input_ids"]
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages = [*system, {"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def asked(corpus: Path, tokenizer: PreTrainedTokenizerBase, config: Config, seeds: Sequence[Response] = ()) -> Asked:
    """All requests about the prompts of the folder ``corpus``; ``seeds`` are what ``seed_requests`` were answered with.

    Raises:
        PipelineError: answers that came with the prompts are wanted, and no training prompt has one.
    """
    requests: list[Request] = []
    given: list[Response] = []
    known: dict[int, int] = {}  # one object for equal ids
    truncated = dropped = 0
    shares, longest = config.generate.shares, config.generate.max_prompt_tokens
    own = {seed.request.prompt_id: seed for seed in seeds}
    behind = frame(tokenizer, config.target.system_prompt)[1] if seeds else []
    for split in ("train", "validation", "test"):
        for place, prompt in enumerate(read_split(corpus / f"{split}.parquet")):
            elsewhere = split == "train" and _elsewhere(place, config)
            if elsewhere and config.regime.kind is Text.corpus and prompt.response is None:
                dropped += 1
                continue
            kind, seed = prompt.kind, own.get(prompt.id) if elsewhere else None
            if seed is None:
                ids = prompt_ids(tokenizer, prompt.text, config.target.system_prompt)
            else:
                kind, ids = SEED, [*seed.request.prompt, *seed.tokens[: len(seed.tokens) - seed.stopped], *behind]
            if len(ids) > longest:
                truncated += 1
                ids = ids[-longest:]
            shared = tuple(map(known.setdefault, ids, ids))
            temperatures = config.generate.temperatures
            for temperature in [temperatures[portion(place, shares)]] if split == "train" else temperatures:
                request = Request(len(requests) + len(given), split, prompt.id, kind, temperature, shared)
                if elsewhere and config.regime.kind is Text.corpus:
                    given.append(answer(request, prompt, tokenizer, config.generate.max_new_tokens))
                else:
                    requests.append(request)
    if dropped and not given:
        raise PipelineError(
            f"regime.kind=corpus: none of {dropped} training prompts came with an answer; name the column of answers in "
            "corpus.response_column, or give regime=generated"
        )
    return Asked(requests, given, truncated, dropped)


def seed_requests(corpus: Path, tokenizer: PreTrainedTokenizerBase, config: Config) -> list[Request]:
    """Requests to write a user's turn, one for each training prompt that it stands in for, whose id it has."""
    before = tuple(frame(tokenizer, config.target.system_prompt)[0])
    return [
        Request(SEED_KEYS + place, SEED, prompt.id, SEED, 1.0, before)
        for place, prompt in enumerate(read_split(corpus / "train.parquet"))
        if _elsewhere(place, config)
    ]


def _elsewhere(place: int, config: Config) -> bool:
    """Whether training prompt number ``place`` gets text from elsewhere."""
    share = config.regime.share
    return config.regime.kind in (Text.corpus, Text.seeds) and portion(place, [share, 1 - share], SILVER) == 0


def portion(place: int, shares: Sequence[float], step: float = GOLDEN) -> int:
    """Which of ``shares`` thing number ``place`` falls to: they are met as evenly as whole things allow."""
    total, reached, point = sum(shares), 0.0, (place * step) % 1.0
    for number, share in enumerate(shares):
        reached += share / total
        if point < reached:
            return number
    return len(shares) - 1


def answer(request: Request, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, longest: int) -> Response:
    """The answer that came with ``prompt``, as the target would have written it: with the id that ends it, if it fits."""
    ids = tokenizer(str(prompt.response), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return Response(request, tuple(ids[:longest]), len(ids) <= longest)


def frame(tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> tuple[list[int], list[int]]:
    """Ids before and behind what a user says in the target's chat template: before, the target writes as a user would.

    Raises:
        PipelineError: the tokenizer has no template that keeps a user's text in one place.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages = [*system, {"role": "user", "content": MARK}]
    template = tokenizer.chat_template is not None
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) if template else ""
    if text.count(MARK) != 1:
        raise PipelineError(
            "regime.kind=seeds: the target has no chat template in which it could write a user's turn; give prompts of your own"
        )
    before, behind = text.split(MARK)
    return tuple(tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, behind))
