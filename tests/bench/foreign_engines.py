"""The exported draft in other engines, on this machine's CPU: what each gains by it, beside this project's engine.

    python -m tests.bench.foreign_engines --target FOLDER --export FOLDER --draft FOLDER [--answers FOLDER]
        [--prompts FILE.jsonl] [--count 6] [--tokens 48] [--drafted 1 2 3] [--engines openvino llama-server ...]

``--export`` is an exported folder, ``--draft`` the same draft as its distil stage keeps it, with its small head, for
Draftsmith's engine. Prompts are those of the test split of ``--answers`` (the result of a generate stage), of the standard
library without it, and of each ``--prompts``. Environments are built under ``--work`` on the first call, which takes up to
an hour on two cores. Every engine is a process of its own that sleeps until its turn; within a prompt all engines and all
their ways follow each other in an order that alternates, and the first prompt warms up. Ratios are the engine's own plain
time ÷ its time with the draft, whole calls, greedy. An engine that fails is listed with its own words.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from pipeline.hardware import machine
from pipeline.statistics import median_interval
from tests.bench import foreign_environments as environments
from tests.bench import prompts as prompts_of
from tests.bench.foreign_environments import Contestant, StepError, last_words

Way = tuple[str | None, int]  # the draft's format and K; (None, 0) is plain
PLAIN: Way = (None, 0)


@dataclass
class Racer:
    """A running engine and what it did: an answer for each prompt, by way."""

    contestant: Contestant
    log: Path
    ways: list[Way]
    rows: list[dict[Way, dict[str, Any]]] = field(default_factory=list)
    version: str = ""
    process: subprocess.Popen | None = None

    @property
    def name(self) -> str:
        return f"{self.contestant.engine} {self.contestant.format}".strip()

    def start(self, threads: int, longest: int) -> None:
        """Start the engine and load its models."""
        one = self.contestant
        drafts = {name: str(path) for name, path in one.drafts.items()}
        settings = {"target": str(one.target), "drafts": drafts, "threads": threads, "longest": longest}
        variables = os.environ | one.environment | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [*one.command, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=variables,
            text=True,
        )
        self.version = self._answer()["version"]

    def decode(self, prompt: list[int], new_tokens: int, way: Way) -> dict[str, Any]:
        """One turn."""
        assert self.process is not None
        assert self.process.stdin is not None
        order = {"prompt": prompt, "new_tokens": new_tokens, "draft": way[0], "drafted": way[1]}
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its own words are in the log
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise StepError(f"exit code {self.process.wait()}: {last_words(self.log)}")
        return json.loads(line)

    def stop(self, patience: float = 30) -> None:
        """End the engine's process: by the end of its input, or by force after ``patience`` seconds."""
        if self.process is not None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:  # the others are still to be ended
                self.process.kill()
                self.process.wait()


def race(racers: list[Racer], prompts: Sequence[list[int]], new_tokens: int, errors: dict[str, str]) -> list[Racer]:
    """Every engine and way on every prompt, the first for warmth alone; gives those that came to the end."""
    for number, prompt in enumerate(prompts):
        turned = racers[number % len(racers) :] + racers[: number % len(racers)] if racers else []
        for racer in turned:
            row = {}
            try:
                for way in racer.ways if number % 2 else reversed(racer.ways):
                    row[way] = racer.decode(prompt, new_tokens, way)
            except StepError as error:
                errors[racer.name] = str(error)
                racers = [other for other in racers if other is not racer]
            if number > 0:
                racer.rows.append(row)
    return racers


def summary(racer: Racer, way: Way, seed: int = 0) -> dict[str, Any]:
    """One line of the table."""
    rows = racer.rows
    rates = [len(row[way]["tokens"]) / row[way]["seconds"] for row in rows]
    found: dict[str, Any] = {
        "engine": racer.contestant.engine,
        "target": racer.contestant.format,
        "draft": way[0],
        "drafted": way[1],
        "tokens_per_second": median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
    }
    if way == PLAIN:
        return found
    ratios = [row[PLAIN]["seconds"] / row[way]["seconds"] for row in rows]
    proposed, accepted, rounds = (sum(row[way][name] for row in rows) for name in ("proposed", "accepted", "rounds"))
    found |= dict(zip(("ratio", "low", "high"), median_interval(ratios, seed), strict=True))
    found |= {"accepted": accepted, "proposed": proposed, "tokens_per_round": 1 + accepted / rounds}
    found["round_cost"] = found["tokens_per_round"] / found["ratio"]
    differing = [(number, difference(row[PLAIN]["tokens"], row[way]["tokens"])) for number, row in enumerate(rows)]
    places = [(number, place) for number, place in differing if place is not None]
    found |= {"equal": len(rows) - len(places), "of": len(rows), "first_difference": places[0] if places else None}
    return found


def difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers differ, None where they are equal."""
    places = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(places, None if len(one) == len(other) else min(len(one), len(other)))


def table(lines: Sequence[dict[str, Any]], title: str) -> Table:
    made = Table("engine, target", "draft", "K", "tokens/s [min, max]", "ratio [95 %]", "accepted", "tokens a round",
                 "round cost", "equal to plain", title=title)  # fmt: skip
    for line in lines:
        rate = f"{line['tokens_per_second']:.1f} [{line['slowest']:.1f}, {line['fastest']:.1f}]"
        cells = [f"{line['engine']} {line['target']}".strip(), line["draft"] or "–", str(line["drafted"]), rate]
        if "ratio" in line:
            place = "" if line["first_difference"] is None else " (prompt {}, token {})".format(*line["first_difference"])
            cells += [f"{line['ratio']:.2f} [{line['low']:.2f}, {line['high']:.2f}]", f"{line['accepted']}/{line['proposed']}"]
            cells += [f"{line['tokens_per_round']:.2f}", f"{line['round_cost']:.2f}", f"{line['equal']}/{line['of']}{place}"]
        made.add_row(*cells)
    return made


def chosen_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Ids of the prompts, after one for warmth."""
    tokenizer, count = AutoTokenizer.from_pretrained(options.target), options.count
    if options.answers is None:
        first = prompts_of.ids(tokenizer, prompts_of.read(None, count + 1))
    else:
        first = prompts_of.held_out(options.answers, count + 1)
    return first + [ids for path in options.prompts for ids in prompts_of.ids(tokenizer, prompts_of.read(path, count))]


def contestants(options: argparse.Namespace, errors: dict[str, str]) -> list[Contestant]:
    """The engines that could be built; what hindered the others goes into ``errors``."""
    work, target, export = options.work.resolve(), options.target.resolve(), options.export.resolve()
    own = [sys.executable, "-m", "tests.bench.foreign_worker", "draftsmith"]
    found = [Contestant("draftsmith", own, target, {"trained": options.draft.resolve()}, format="f32")]
    makers: dict[str, Callable[[], list[Contestant]]] = {
        "openvino": lambda: environments.openvino(work, target, export),
        "llama-cpp-python": lambda: environments.llama_cpp(work, target, export, "llama-cpp-python"),
        "llama-server": lambda: environments.llama_cpp(work, target, export, "llama-server"),
    }
    for name in options.engines:
        try:
            found += makers[name]()
        except (StepError, OSError) as error:
            errors[name] = str(error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "export", "draft"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--prompts", type=Path, action="append", default=[])
    parser.add_argument("--work", type=Path, default=Path("outputs/foreign"))
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafted", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=machine()["cores"])
    parser.add_argument("--engines", nargs="*", default=["openvino", "llama-cpp-python", "llama-server"])
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    errors: dict[str, str] = {}
    racers = []
    for one in contestants(options, errors):
        ways = [PLAIN, *((draft, drafted) for draft in one.drafts for drafted in options.drafted)]
        racer = Racer(one, options.work / f"{one.engine}-{one.format}.log", ways)
        try:
            racer.start(options.threads, prompts_of.LONGEST + options.tokens + 64)
            racers.append(racer)
        except StepError as error:
            errors[racer.name] = str(error)
    try:
        prompts = chosen_prompts(options)
        finished = race(racers, prompts, options.tokens, errors)
    finally:
        for racer in racers:
            racer.stop()
    lines = [summary(racer, way) for racer in finished for way in racer.ways]
    Console().print(table(lines, f"{len(prompts) - 1} prompts, {options.tokens} new tokens, greedy, {options.threads} threads"))
    for name, words in errors.items():
        Console().print(f"{name} failed: {words}")
    versions = {racer.name: racer.version for racer in racers}
    print(json.dumps({"lines": lines, "errors": errors, "versions": versions, "environment": machine()}))


if __name__ == "__main__":
    main()
