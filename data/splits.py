"""Train, validation and test: every source lies in exactly one of them.

A hash of the seed and the source's name decides, so a source keeps its split when others come or go, and the order in
which prompts arrive changes nothing. It knows nothing of where prompts come from.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data.artifact import fingerprint
from data.prompts import Corpus, CorpusError, Prompt

HELD_OUT: Mapping[str, float] = {"validation": 0.05, "test": 0.05}

_SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "source", "kind", "text")])


def split(
    prompts: Iterable[Prompt],
    *,
    limits: Mapping[str, int],
    seed: int,
    fractions: Mapping[str, float] = HELD_OUT,
    counts: Mapping[str, int] | None = None,
) -> Corpus:
    """Divide prompts by source, drop repeated texts, spread each split over kinds and cut it to its limit.

    Args:
        prompts: from one reader or several.
        limits: most prompts of "train" and of every split in ``fractions``.
        seed: another seed is another division and another order.
        fractions: share of the sources that each held-out split gets; "train" gets the rest.
        counts: what the reader counted; the result continues it.
    """
    rest = 1 - sum(fractions.values())
    if rest <= 0 or min(fractions.values(), default=0) < 0 or set(limits) != {"train", *fractions}:
        raise ValueError(f"fractions {dict(fractions)} must leave something for train and have limits {dict(limits)}")
    ordered = sorted(prompts, key=lambda p: (p.id, p.text))
    unique = {p.text: p for p in reversed(ordered)}  # of equal texts the one with the lowest id stays
    places = _assign({p.source for p in unique.values()}, fractions, limits, seed)
    members: dict[str, list[Prompt]] = {name: [] for name in ("train", *fractions)}
    for p in unique.values():
        members[places[p.source]].append(p)
    splits = {name: _spread(group, seed)[: limits[name]] for name, group in members.items()}
    tally = Counter(counts or {"read": len(ordered)})
    tally["kept"] = sum(map(len, splits.values()))
    tally["dropped/duplicate"] += len(ordered) - len(unique)
    tally["dropped/over_limit"] += len(unique) - tally["kept"]
    return Corpus(splits, dict(tally))


def write_split(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write one split as Parquet with the columns id, source, kind and text, and response if there is any; atomicity is
    the caller's."""
    schema = _SCHEMA.append(pa.field("response", pa.string())) if any(p.response is not None for p in prompts) else _SCHEMA
    rows = [{name: getattr(p, name) for name in schema.names} for p in prompts]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd")


def read_split(path: Path) -> list[Prompt]:
    """The prompts of one split, in their order."""
    return [Prompt(**row) for row in pq.read_table(path).to_pylist()]


def _assign(sources: set[str], fractions: Mapping[str, float], limits: Mapping[str, int], seed: int) -> dict[str, str]:
    """The split of each source; where chance leaves a wanted split empty, a source moves there if one can be spared."""
    places = {source: _draw(source, fractions, seed) for source in sorted(sources)}
    for name in (name for name, limit in limits.items() if limit > 0):
        sizes = Counter(places.values())
        if sizes[name]:
            continue
        spare = {s: sizes[s] - (limits[s] > 0) for s in sorted(sizes)}  # a wanted split keeps one source
        donor = max(spare, key=spare.__getitem__, default=name)
        if spare.get(donor, 0) < 1:
            raise CorpusError(
                f"corpus.{name}={limits[name]} gets no prompt: the corpus has {len(sources)} source(s), too few for "
                f"its splits; add prompts to corpus.path, set corpus.document_column to a column that tells more "
                f"documents apart (or to null: each row by itself), or set corpus.{name}=0"
            )
        givers = [source for source, place in places.items() if place == donor]
        places[min(givers, key=lambda source: fingerprint([seed, name, source]))] = name
    return places


def _draw(source: str, fractions: Mapping[str, float], seed: int) -> str:
    point = int(fingerprint([seed, source]), 16) / 2**64
    for name, fraction in fractions.items():
        if point < fraction:
            return name
        point -= fraction
    return "train"


def _spread(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Prompts in hashed order, the kinds in turn, so that a cut of any length holds them in equal parts."""
    turn: Counter[str] = Counter()
    ranked: list[tuple[int, str, Prompt]] = []
    for key, p in sorted(((fingerprint([seed, p.id]), p) for p in prompts), key=lambda pair: pair[0]):
        ranked.append((turn[p.kind], key, p))
        turn[p.kind] += 1
    return [p for *_, p in sorted(ranked, key=lambda r: r[:2])]
