"""The race: one prompt at a time, every way of decoding it, interleaved; then counts, medians and intervals.

Each contestant writes the same number of tokens after the same prompt. Wall seconds are of the whole call, prefill and
all; the ratio after prefill is kept beside it, because that is what the cost model speaks of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import lightning as L
from transformers import PreTrainedModel

import speculative
from pipeline import baselines, lossy, price
from pipeline.plan import Heat
from pipeline.statistics import median_interval
from speculative import Draft, MedusaHeads, Tree
from speculative.metrics import Acceptance, total


class Race(L.LightningModule):
    """One prompt at a time: every way of decoding it, one after the other, in an order that alternates."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Draft | MedusaHeads,
        helpers: Sequence[PreTrainedModel | None],
        rule: Mapping[str, Any],
        seed: int,
        trees: Mapping[float, Tree],
        ids: int | None = None,
    ) -> None:
        """``helpers``: what transformers decodes with as well, None alone; ``trees``: raced as well, by temperature.

        ``ids`` of the target can be drawn, rows of its head behind them are padding. ``rule``: how drafts are judged, as
        options of ``speculative.generate``.
        """
        super().__init__()
        self.target, self.draft, self.helpers = target, draft, helpers
        self.rule, self.seed, self.trees, self.ids = rule, seed, trees, ids
        self.rows: list[dict[str, Any]] = []
        self.warm: set[float] = set()

    def test_step(self, heat: Heat, batch_idx: int) -> None:
        if heat.sampling.temperature not in self.warm:
            self.warm.add(heat.sampling.temperature)
            self._race(heat, batch_idx)
        self.rows.append(self._race(heat, batch_idx))

    def _race(self, heat: Heat, number: int) -> dict[str, Any]:
        request = heat.answer.request
        row: dict[str, Any] = {
            "id": request.prompt_id,
            "kind": request.kind,
            "temperature": heat.sampling.temperature,
            "new_tokens": heat.new_tokens,
            "draft_tokens": heat.draft_tokens,
            "predicted": heat.predicted,
        }
        runs: list[tuple[str, int | Tree]] = [("plain", 0), ("speculative", heat.draft_tokens)]
        if heat.sampling.temperature in self.trees:
            runs.append(("tree", self.trees[heat.sampling.temperature]))
        texts: dict[str, list[int]] = {}
        for name, shape in runs if number % 2 == 0 else reversed(runs):
            done = self._decode(heat, shape)
            texts[name] = done.tokens[0]
            row[f"{name}_seconds"] = sum(asdict(done.seconds).values())
            row[f"{name}_decoding_seconds"] = done.seconds.decoding
            if name == "speculative":
                row |= {"acceptance": done.acceptance[0], "phases": asdict(done.seconds)}
            elif name == "tree":
                row["tree_acceptance"] = done.acceptance[0]
        for helper in self.helpers:
            options = (self.target, list(request.prompt), heat.new_tokens, heat.sampling, self.seed)
            name = "transformers" if helper is None else "assisted"
            theirs = baselines.decode(*options, helper, heat.draft_tokens)
            row[f"{name}_seconds"] = theirs.seconds
            row[f"{name}_forwards"] = theirs.target_forwards
            if helper is not None:
                row["drafting_forwards"] = theirs.draft_forwards
        if self.rule["typical"] is not None and not heat.sampling.greedy:
            row["excess"] = lossy.measured(self.target, request.prompt, texts, heat.sampling, self.rule["typical"])
        return row

    def _decode(self, heat: Heat, shape: int | Tree) -> speculative.Generation:
        return speculative.generate(
            self.target,
            self.draft if shape else None,
            [heat.answer.request.prompt],
            max_new_tokens=heat.new_tokens,
            **({"tree": shape} if isinstance(shape, Tree) else {"num_draft_tokens": shape}),
            sampling=heat.sampling,
            **self.rule,
            seed=self.seed,
            row_keys=[heat.answer.request.key],
            vocabulary_size=self.ids,
        )

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


def summary(rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Counts and medians over prompts, with bootstrap intervals.

    Under ``tree`` those of the tree, if one was raced; under ``lossy`` how far the texts are from the target, if they are.
    """
    counts: Acceptance = total(row["acceptance"] for row in rows)
    found: dict[str, Any] = {
        "acceptance_rate": counts.rate,
        "tokens_per_round": counts.tokens_per_round,
        "by_position": counts.by_position,
        "rounds": counts.rounds,
        "emitted": counts.emitted,
    }

    def ratio(above: str, below: str) -> dict[str, float]:
        values = [row[above] / row[below] for row in rows]
        return dict(zip(("median", "low", "high"), median_interval(values, seed), strict=True))

    found["ratio"] = ratio("plain_seconds", "speculative_seconds")
    found["ratio_decoding"] = ratio("plain_decoding_seconds", "speculative_decoding_seconds")
    if "tree_seconds" in rows[0]:
        counts_of_tree: Acceptance = total(row["tree_acceptance"] for row in rows)
        found["tree"] = {
            "tokens_per_round": counts_of_tree.tokens_per_round,
            "by_position": counts_of_tree.by_position,
            "ratio": ratio("plain_seconds", "tree_seconds"),
            "ratio_decoding": ratio("plain_decoding_seconds", "tree_decoding_seconds"),
            "ratio_chain": ratio("speculative_seconds", "tree_seconds"),
        }
    if "excess" in rows[0]:
        found[lossy.LABEL] = {"at_least": {way: lossy.at_least(rows, way, seed) for way in rows[0]["excess"]}}
    for name in ("transformers", "assisted"):
        if f"{name}_seconds" in rows[0]:
            found[f"ratio_{name}"] = ratio(f"{name}_seconds", "speculative_seconds")
    if any(row.get("drafting_forwards") for row in rows):
        found["stock"] = price.measured(rows)
    new_tokens = sum(row["new_tokens"] for row in rows)
    found["plain_tokens_per_second"] = new_tokens / sum(row["plain_seconds"] for row in rows)
    found["speculative_tokens_per_second"] = new_tokens / sum(row["speculative_seconds"] for row in rows)
    found["phases"] = {key: sum(row["phases"][key] for row in rows) for key in rows[0]["phases"]}
    long = ("acceptance", "tree_acceptance", "phases", "excess")
    columns = [key for key in rows[0] if key not in long and not key.endswith("_forwards")]
    found["prompts"] = [
        {**{key: row[key] for key in columns}, "tokens_per_round": row["acceptance"].tokens_per_round} for row in rows
    ]
    return found


def metrics(measured: dict[str, Any]) -> dict[str, float]:
    named = {
        "acceptance/rate": measured["acceptance_rate"],
        "acceptance/tokens_per_round": measured["tokens_per_round"],
        "speed/ratio": measured["ratio"]["median"],
        "speed/ratio_low": measured["ratio"]["low"],
        "speed/ratio_high": measured["ratio"]["high"],
        "speed/ratio_decoding": measured["ratio_decoding"]["median"],
        "speed/tokens_per_second_plain": measured["plain_tokens_per_second"],
        "speed/tokens_per_second": measured["speculative_tokens_per_second"],
    }
    named |= {f"acceptance/position_{k}": rate for k, rate in enumerate(measured["by_position"], start=1)}
    if "tree" in measured:
        tree = measured["tree"]
        named |= {
            "tree/tokens_per_round": tree["tokens_per_round"],
            "tree/ratio": tree["ratio"]["median"],
            "tree/ratio_low": tree["ratio"]["low"],
            "tree/ratio_high": tree["ratio"]["high"],
            "tree/ratio_decoding": tree["ratio_decoding"]["median"],
            "tree/ratio_chain": tree["ratio_chain"]["median"],
        }
    if "stock" in measured:
        named |= {f"stock/{name}": measured["stock"][name] for name in ("acceptance_rate", "tokens_per_round", "draft_step")}
    others = [name for name in ("ratio_transformers", "ratio_assisted") if name in measured]
    return named | {f"speed/{name}": measured[name]["median"] for name in others}
