"""The table at the end of a run: what was built, how well it agrees, how much time it saves, where things are."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline import beside_table, comparison, lossy
from pipeline.beside import Neighbour
from pipeline.calibrate import costs_of
from pipeline.choices import Stage
from pipeline.context import Context
from pipeline.proposer import words
from pipeline.validation import KINDS
from speculative.cost import Costs


def show(context: Context, uri: str, beside: Sequence[Neighbour]) -> None:
    """Print what is known of this run, and the drafts ``beside`` its own, if there are any."""
    console = Console()
    rows = summary(context)
    if Stage.export in context.artifacts:
        rows.append(("export", context.parent(Stage.export).details["folder"]))
    rows.append(("tracking", f"mlflow ui --backend-store-uri {uri} --host 127.0.0.1   (or: make ui)"))
    table = Table(title="Draftsmith", title_justify="left", show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    if beside:
        beside_table.show(beside)


def summary(context: Context) -> list[tuple[str, str]]:
    """Rows (name, text) for the stages that are there."""
    have = context.artifacts
    rows = []
    if Stage.corpus in have:
        details = have[Stage.corpus].details
        counts = ", ".join(f"{key} {value:,}" for key, value in details["counts"].items())
        rows.append(("corpus", f"{_parts(details['prompts'])}  ({counts})"))
    if Stage.generate in have:
        rows.append(("target", f"{context.target.name}, {str(context.dtype).removeprefix('torch.')}"))
        details = have[Stage.generate].details
        rows.append(
            ("responses", f"{details['responses']:,} with {details['response_tokens']:,} tokens; "
             f"{details['prompts_truncated']} prompts cut from the left")
        )  # fmt: skip
    if Stage.logits in have:
        details = have[Stage.logits].details
        per_token = details["train_bytes_per_token"]
        rows.append(("logits", f"{details['positions']:,} positions, {per_token:.0f} bytes each where they are learnt from"))
    if Stage.distil in have:
        rows += _draft(have[Stage.distil].details)
    if Stage.speculate in have and Stage.calibrate in have:
        rows += _speed(have[Stage.speculate].details, have[Stage.calibrate].details)
    if Stage.drafters in have:
        rows += comparison.verdict_rows(have[Stage.drafters].details)
    return rows


def _parts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in counts.items())


def _draft(details: dict[str, Any]) -> list[tuple[str, str]]:
    shape = details["shape"]
    text = (
        f"{words(shape)} (covers {details['vocabulary_coverage']:.1%} of generated text), "
        f"{shape['parameters'] / 1e6:.1f} M parameters, {shape['read_per_step'] / 1e6:.1f} M read a step"
    )
    if not details["train_positions"]:
        return [("draft", text), ("training", "none: measured as it is")]
    training = f"{details['train_positions']:,} positions, {details['epochs']:.1f} epochs, best at step {details['best_step']}"
    return [("draft", text), ("training", training)]


def _speed(speculate: dict[str, Any], calibrate: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for temperature, entry in speculate["by_temperature"].items():
        break_even = calibrate["by_temperature"][temperature]["break_even_overlap"]
        at = f"T={temperature}{lossy.mark(entry)}"
        rows.append((f"alignment T={temperature}", _agreement(entry)))
        if len(entry.get("kinds", {})) > 1:
            rows.append((f"by kind T={temperature}", _kinds(entry["kinds"])))
        rows.append((
            f"acceptance {at}",
            f"rate {_number(entry['acceptance_rate'])} at K={entry['draft_tokens']}, {entry['tokens_per_round']:.2f} tokens a "
            f"round (predicted {entry['tokens_per_round_predicted']:.2f}); by position "
            + " ".join(_number(rate) for rate in entry["by_position"]),
        ))  # fmt: skip
        rows.append((f"speed {at}", _ratio(entry, break_even)))
        if "tree" in entry:
            rows.append((f"tree {at}", _tree(entry["tree"])))
        if lossy.LABEL in entry:
            rows.append((f"{lossy.LABEL} T={temperature}", lossy.words(entry[lossy.LABEL])))
        if entry["ratio"]["low"] < 1:
            rows.append((f"verdict {at}", verdict(entry, costs_of(calibrate, float(temperature)), break_even)))
    lossless, loss = speculate["lossless"], lossy.of(speculate["by_temperature"])
    answers = lossless["oracle_answers"]
    rows.append((
        "lossless",
        f"{lossless['prompts'] - lossless['different']} of {lossless['prompts']} held-out prompts: greedy speculative output "
        "equals greedy plain output (float32, token for token)"
        + (f"; {answers - lossless['oracle_different']} of {answers} answers of transformers too" if answers else "")
        + (f"; this says nothing of temperature {', '.join(loss)}, which was decoded with loss" if loss else ""),
    ))  # fmt: skip
    return rows


def _agreement(entry: dict[str, Any]) -> str:
    """The measures after distillation, and before it if they were taken."""
    before, after = entry["before"], entry["after"]

    def both(name: str, digits: int) -> str:
        return (f"{before[name]:.{digits}f} → " if before else "") + f"{after[name]:.{digits}f}"

    return (
        f"forward KL {both('forward_kl', 2)}, overlap {both('overlap', 3)}, top-1 {both('top1', 3)}  "
        f"({'before → after, ' if before else ''}{entry['positions']:,} positions of held-out text)"
    )


def _kinds(kinds: dict[str, dict[str, float]]) -> str:
    """The overlap of the most frequent kinds of prompt."""
    shown = [f"{kind} {figures['overlap']:.3f}" for kind, figures in [*kinds.items()][:KINDS]]
    return f"overlap as decoded: {', '.join(shown)}" + (f", and {len(kinds) - KINDS} more" if len(kinds) > KINDS else "")


def _ratio(entry: dict[str, Any], break_even: float) -> str:
    ratio = entry["ratio"]
    text = (
        f"{ratio['median']:.2f}× [{ratio['low']:.2f}, {ratio['high']:.2f}], predicted {entry['predicted']:.2f}×; "
        f"{entry['plain_tokens_per_second']:.1f} → {entry['speculative_tokens_per_second']:.1f} tokens/s"
    )
    if "ratio_transformers" in entry:
        text += f"; against transformers generate {entry['ratio_transformers']['median']:.2f}×"
    if "ratio_assisted" in entry:
        text += f", its assisted generation {entry['ratio_assisted']['median']:.2f}×"
    return text + f"; break-even overlap {break_even:.2f}"


def _tree(tree: dict[str, Any]) -> str:
    """What was raced beside the chain, what was expected of it and what it brought."""
    ratio, chain = tree["ratio"], tree["ratio_chain"]
    return (
        f"{tree['shape']}: {ratio['median']:.2f}× [{ratio['low']:.2f}, {ratio['high']:.2f}], predicted "
        f"{tree['predicted']:.2f}×, after prefill {tree['ratio_decoding']['median']:.2f}×; {tree['tokens_per_round']:.2f} "
        f"tokens a round (predicted {tree['tokens_per_round_predicted']:.2f}); {chain['median']:.2f}× as fast as the chain "
        f"[{chain['low']:.2f}, {chain['high']:.2f}]"
        + ("" if tree["recommended"] else "; plain decoding was expected to be faster")
    )


def verdict(entry: dict[str, Any], costs: Costs, break_even: float) -> str:
    """Why speculation does not clearly win here."""
    length = entry["draft_tokens"]
    word = "loses" if entry["ratio"]["high"] < 1 else "is not shown to win"
    reason = (
        f"a round costs {costs.round(length):.2f} plain steps (drafting {costs.drafting(length):.2f}, verification "
        f"{costs.verify[length]:.2f}) and yields {entry['tokens_per_round']:.2f} tokens"
    )
    overlap = f"acceptance {entry['after']['acceptance']:.2f} against a break-even of {break_even:.2f}"
    return f"speculation {word} on this machine: {reason}; {overlap}"


def markdown(rows: list[tuple[str, str]]) -> str:
    """The same rows as a Markdown table."""
    lines = [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    return "\n".join(["| | |", "| --- | --- |", *lines]) + "\n"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
