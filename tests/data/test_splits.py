from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.prompts import CorpusError, prompt
from data.splits import read_split, split, write_split

PLENTY = {"train": 10**6, "validation": 10**6, "test": 10**6}


def many(sources: int, each: int = 5, kinds: int = 1) -> list:
    return [prompt(f"s{s}", f"k{i % kinds}", f"text {s} {i}") for s in range(sources) for i in range(each)]


def balanced(counts: dict[str, int]) -> bool:
    return counts["read"] == counts["kept"] + sum(n for key, n in counts.items() if key.startswith("dropped/"))


rows = st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.integers(0, 40)), max_size=60)
sizes = st.fixed_dictionaries({name: st.integers(0, 8) for name in PLENTY})


@settings(deadline=None, max_examples=150)
@given(rows, sizes, st.integers(0, 5), st.randoms(use_true_random=False))
def test_splits_are_disjoint_complete_and_independent_of_order(rows, limits, seed, random):
    prompts = [prompt(f"s{s}", kind, f"t{text}") for s, kind, text in rows]
    try:
        corpus = split(prompts, limits=limits, seed=seed)
    except CorpusError:
        unique = {p.text: p.source for p in sorted(prompts, key=lambda p: p.id, reverse=True)}
        assert len(set(unique.values())) < sum(n > 0 for n in limits.values())
        return
    assert balanced(corpus.counts)
    assert corpus.counts["kept"] == sum(map(len, corpus.splits.values()))
    for name, group in corpus.splits.items():
        assert len(group) <= limits[name]
        assert group or not limits[name]
    sources = [{p.source for p in group} for group in corpus.splits.values()]
    assert sum(map(len, sources)) == len(set().union(*sources))
    texts = [p.text for group in corpus.splits.values() for p in group]
    assert len(texts) == len(set(texts))
    shuffled = list(prompts)
    random.shuffle(shuffled)
    assert split(shuffled, limits=limits, seed=seed) == corpus


def test_shares_follow_the_fractions_and_the_seed_matters():
    prompts = many(1000, each=1)
    corpus = split(prompts, limits=PLENTY, seed=0, fractions={"validation": 0.2, "test": 0.1})
    assert {name: round(len(group), -2) for name, group in corpus.splits.items()} == {
        "train": 700,
        "validation": 200,
        "test": 100,
    }
    other = split(prompts, limits=PLENTY, seed=1, fractions={"validation": 0.2, "test": 0.1})
    assert {p.id for p in other.splits["test"]} != {p.id for p in corpus.splits["test"]}


def test_a_source_keeps_its_split_when_others_come():
    few, more = (split(many(n), limits=PLENTY, seed=0).splits for n in (200, 400))
    for name in PLENTY:
        assert {p.id for p in few[name]} <= {p.id for p in more[name]}


def test_a_larger_limit_extends_a_smaller_one():
    small, large = (split(many(200), limits=dict.fromkeys(PLENTY, n), seed=0).splits for n in (5, 9))
    for name in PLENTY:
        assert large[name][:5] == small[name]


def test_equal_texts_are_kept_once_and_counts_continue():
    prompts = [*many(30), prompt("another", "k0", "text 0 0")]
    counts = {"read": len(prompts) + 4, "kept": len(prompts), "dropped/empty": 4, "truncated/long": 2}
    corpus = split(prompts, limits={"train": 50, "validation": 2, "test": 2}, seed=0, counts=counts)
    assert corpus.counts["dropped/duplicate"] == 1
    assert corpus.counts["dropped/over_limit"] > 0
    assert corpus.counts["truncated/long"] == 2
    assert balanced(corpus.counts)


def test_a_cut_split_holds_all_kinds_in_equal_parts():
    corpus = split(many(200, each=10, kinds=5), limits=dict.fromkeys(PLENTY, 12), seed=3)
    for group in corpus.splits.values():
        assert sorted(Counter(p.kind for p in group).values()) == [2, 2, 2, 3, 3]


@pytest.mark.parametrize("seed", range(8))
def test_three_sources_are_enough(seed):
    splits = split(many(3), limits=PLENTY, seed=seed).splits
    assert [len({p.source for p in group}) for group in splits.values()] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_one_source_can_be_all_training(seed):
    splits = split(many(1), limits={"train": 9, "validation": 0, "test": 0}, seed=seed).splits
    assert len(splits["train"]) == 5


def test_too_few_sources_name_the_keys():
    with pytest.raises(CorpusError, match=r"corpus.test=3 gets no prompt: .*2 source.*corpus.document_column.*=0"):
        split(many(2), limits={"train": 3, "validation": 3, "test": 3}, seed=0)
    with pytest.raises(CorpusError, match=r"corpus.train=3 gets no prompt"):
        split([], limits={"train": 3, "validation": 3, "test": 3}, seed=0)


def test_fractions_must_leave_training_data():
    with pytest.raises(ValueError, match="must leave something for train"):
        split(many(3), limits={"train": 1, "test": 1}, fractions={"test": 1.0}, seed=0)


def test_a_split_survives_parquet(tmp_path):
    prompts = [prompt("s", "k", "line\nline “é”"), *many(2)]
    write_split(tmp_path / "train.parquet", prompts)
    assert read_split(tmp_path / "train.parquet") == prompts
    answered = [prompt("s", "k", "a", "an answer"), prompt("s", "k", "b")]
    write_split(tmp_path / "answered.parquet", answered)
    assert read_split(tmp_path / "answered.parquet") == answered
    write_split(tmp_path / "none.parquet", [])
    assert read_split(tmp_path / "none.parquet") == []
