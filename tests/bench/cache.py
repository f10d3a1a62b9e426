"""The logit cache on a target's own text: bytes, error of the estimated overlap, drafts learnt from it, writing, reading.

    python -m tests.bench.cache [--only fidelity,drafts,memory] [--target FOLDER] [--text FOLDER] [--positions 20000]

Without ``--target``, the model of ``make run`` is used; ``--text`` is a folder of stage generate with kept states, and
without it the target writes. Figures of ``fidelity``, ``drafts`` and ``memory`` do not depend on what else the machine does;
``write`` and ``read`` are timed and want it for themselves. The draft whose overlap is estimated is the target with noise on
its logits. Drafts are distilled from three codecs and from dense targets with the same seed and steps, and compared on text
that none of them saw.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedModel

from data import standard_library
from data.codec import Codec
from data.dense import Dense
from data.fidelity import measures, noisy, summary
from data.hidden import Hidden
from data.logit_cache import LogitCache, write_head
from data.responses import Response
from data.shards import Seal, write_shard
from data.states import States
from data.topk import TopK
from pipeline.generate import eos_token_ids
from pipeline.hardware import machine
from pipeline.requests import prompt_ids
from pipeline.teacher import head_of, known
from speculative import pack
from tests.bench import costs, learnt, subject, text

CODECS: dict[str, Codec] = {
    "topk": TopK(32, 14, bits=8),
    "small": TopK(8, 6, bits=8),
    "topk, nothing drawn, 16 bits": TopK(128),
    "hidden": Hidden(8),
    "hidden, 16 bits": Hidden(16),
    "dense": Dense(),
}
RENORMALISED = 32  # ids of the bad example, which forgets the tail
LEARNT = ("dense", "topk", "small", "hidden")
READS = {"fidelity": tuple(CODECS), "drafts": LEARNT, "write": (), "read": ("topk",), "memory": ()}  # codecs, by part
BATCH = 16


@torch.inference_mode()
def write(model: PreTrainedModel, rows: list[Response], states: States, root: Path, names: Sequence[str]) -> None:
    """A cache of ``rows`` in ``root``/name for each codec named."""
    write_head(root, "bench", *head_of(model))
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    for number, batch in enumerate(track(batches, description="every codec writes", transient=True)):
        outputs = {hidden: known(model, batch, states, hidden) for hidden in (False, True)}
        tokens = [([*r.request.prompt, *r.tokens], len(r.request.prompt)) for r in batch]
        for name in names:
            given = outputs[isinstance(CODECS[name], Hidden)]
            parts = [CODECS[name].encode(row, r.request.key) for row, r in zip(given, batch, strict=True)]
            stored = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            seal = Seal("bench", name, number, len(batches), CODECS[name], model.config.vocab_size)
            write_shard(root / name, tokens, stored, seal)


@torch.inference_mode()
def fidelity(model: PreTrainedModel, rows: list[Response], states: States, root: Path) -> dict[str, dict[str, float]]:
    """By codec: bytes a token, and what its cache of ``rows`` lost, read back; and the cap of the bad example."""
    caches = {name: LogitCache(root / name, "bench") for name in CODECS}
    measured: dict[str, list[torch.Tensor]] = {name: [] for name in CODECS}
    mass: list[torch.Tensor] = []
    for place, row in enumerate(track(rows, description="fidelity", transient=True)):
        log_p = text.log_probs(model, row, states)
        log_q = noisy(log_p, 1.0, row.request.key)
        mass.append(log_p.topk(min(RENORMALISED, log_p.shape[1])).values.exp().sum(-1))
        for name, cache in caches.items():
            measured[name].append(measures(log_p, cache[place].targets, log_q))
    count = sum(len(r.tokens) for r in rows)
    found = {name: dict(vars(summary(torch.cat(parts)))) for name, parts in measured.items()}
    for name in CODECS:
        found[name]["bytes"] = sum(path.stat().st_size for path in (root / name).iterdir()) / count
    return found | {"renormalised": {"cap": float(torch.cat(mass).mean())}}


def main() -> None:
    options = _options()
    files, dtype = subject.chosen(options)
    model = pack(files.load(dtype))  # as the stage reads
    line: dict[str, object] = {}
    found, overlaps, share = {}, {}, {}
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        root = Path(scratch)
        folder = options.text or root / "text"
        positions = options.positions * 6 // 5  # an eighth of the rows is seen by no draft
        if options.text is None:
            tokenizer = files.tokenizer()
            eos = eos_token_ids(model, tokenizer)
            text.write(model, list(_prompts(tokenizer, options)), positions, options.tokens, folder, eos)
        rows, states = text.read(folder, positions), States(folder)
        others, seen = rows[: len(rows) // 8], rows[len(rows) // 8 :]
        write(model, seen, states, root, [name for name in CODECS if any(name in READS[part] for part in options.only)])
        if "fidelity" in options.only:
            found = fidelity(model, seen, states, root)
            line |= _fidelity_keys(found)
        if "write" in options.only:
            timed = {name: (CODECS[name], root / f"timed-{name}") for name in ("topk", "hidden")}
            share = {name: costs.forward_share_of_writing(model, seen, *given) for name, given in timed.items()}
            line["write_share_of_forward"] = share["topk"]
        model = model.float()
        if "read" in options.only or "drafts" in options.only:
            topk = LogitCache(root / "topk", "bench")
            begun = learnt.start(model, topk, options.vocabulary)
            if "read" in options.only:
                line["read_over_consume"] = costs.read_over_consume(model, begun, topk)
        if "drafts" in options.only:
            for name in LEARNT:
                draft = learnt.taught(model, begun, LogitCache(root / name, "bench"), options.steps)
                overlaps[name] = learnt.overlap(model, draft, others, states)
                print(f"a draft learnt from {name} overlaps by {overlaps[name]:.4f}", file=sys.stderr, flush=True)
            line |= {f"{name}_draft_overlap_loss": overlaps["dense"] - overlaps[name] for name in LEARNT[1:]}
        if "memory" in options.only:
            growth = costs.reader_rss_growth_mb(root, max(1000, options.synthetic // 20), options.synthetic)
            line["reader_rss_growth_mb"] = growth
    count = sum(len(r.tokens) for r in seen)
    Console(width=140).print(_table(f"The logit cache of {files.name}, {count} positions, {dtype}", found, overlaps, share))
    print(json.dumps(line | {"positions": count, "environment": machine()}))


def _fidelity_keys(found: dict[str, dict[str, float]]) -> dict[str, float]:
    return {
        "topk_bytes_per_token": found["topk"]["bytes"],
        "topk_overlap_error": abs(found["topk"]["overlap_bias"]),
        "small_bytes_per_token": found["small"]["bytes"],
        "small_overlap_error": abs(found["small"]["overlap_bias"]),
        "hidden_bytes_per_token": found["hidden"]["bytes"],
        "hidden_kl": found["hidden"]["kl"],
        "renormalised_cap": found["renormalised"]["cap"],
    }


def _table(title: str, found: dict, overlaps: dict[str, float], share: dict[str, float]) -> Table:
    table = Table(title=title)
    for heading in ("codec", "bytes/token", "KL", "overlap error ± SE", "interval", "draft's overlap", "forward ÷ write"):
        table.add_column(heading)
    for name in CODECS:
        f = found.get(name)
        lost = [""] * 4 if f is None else [
            f"{f['bytes']:.1f}", f"{f['kl']:.2g}", f"{f['overlap_bias']:+.4f} ± {f['overlap_standard_error']:.4f}",
            f"{f['overlap_lower']:.3f} … {f['overlap_upper']:.3f}",
        ]  # fmt: skip
        rest = (f"{given[name]:.{digits}f}" if name in given else "" for given, digits in ((overlaps, 4), (share, 3)))
        table.add_row(name, *lost, *rest)
    if found:
        cap = f"cannot pass {found['renormalised']['cap']:.3f}"
        table.add_row(f"top {RENORMALISED}, renormalised: the bad example", "", "", "", "", cap, "")
    return table


def _options() -> argparse.Namespace:
    parser = subject.parser(__doc__)
    parser.add_argument("--only", type=_parts, default=tuple(READS), help="parts, with commas between them; all by default")
    parser.add_argument("--text", type=Path, help="a folder of stage generate, with kept states")
    parser.add_argument("--positions", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, where the target writes")
    parser.add_argument("--steps", type=int, default=60, help="of each distillation")
    parser.add_argument("--vocabulary", type=int, default=8192, help="of the drafts")
    parser.add_argument("--synthetic", type=int, default=2_000_000, help="tokens that the reader's memory is measured on")
    return parser.parse_args()


def _parts(named: str) -> tuple[str, ...]:
    unknown = sorted(set(named.split(",")) - set(READS))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the parts are {', '.join(READS)}")
    return tuple(named.split(","))


def _prompts(tokenizer, options: argparse.Namespace) -> Iterator[list[int]]:
    """As many prompts as may be needed, since an answer can end early."""
    texts, _ = standard_library.read()
    for prompt in texts[:: max(1, len(texts) * options.tokens // (4 * options.positions))]:
        yield prompt_ids(tokenizer, prompt.text, None)[-256:]


if __name__ == "__main__":
    main()
