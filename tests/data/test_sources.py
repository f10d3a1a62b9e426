import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import sources
from data.prompts import CorpusError


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(*args, **kwargs) -> list[str]:
    return [p.text for p in sources.read(*args, **kwargs)[0]]


def test_jsonl_rows_are_their_own_sources(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": "one"}, {"prompt": " two "}])
    prompts, counts = sources.read(str(path))
    assert [(p.source, p.kind, p.text) for p in prompts] == [("p.jsonl:1", "user", "one"), ("p.jsonl:2", "user", "two")]
    assert counts == {"read": 2, "kept": 2}


def test_json_parquet_csv_and_text(tmp_path):
    (tmp_path / "a.json").write_text('[{"prompt": "json"}]')
    pq.write_table(pa.table({"prompt": ["parquet"]}), tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text("prompt,other\ncsv,1\n")
    (tmp_path / "d.txt").write_text("text\n\nmore text\n")
    (tmp_path / "README.md").write_text("not read")
    prompts, counts = sources.read(str(tmp_path))
    assert [p.text for p in prompts] == ["json", "parquet", "csv", "text", "more text"]
    assert [p.source for p in prompts][-1] == "d.txt:3"
    assert counts == {"read": 6, "kept": 5, "dropped/empty": 1}
    assert texts(str(tmp_path / "d.txt"), column="ignored") == ["text", "more text"]


def test_the_source_does_not_depend_on_where_the_folder_lies(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name / "sub").mkdir(parents=True)
        jsonl(tmp_path / name / "sub" / "p.jsonl", [{"prompt": "one"}])
    assert sources.read(str(tmp_path / "x")) == sources.read(str(tmp_path / "y"))


def test_a_changed_file_is_read_anew(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": "one"}])
    assert texts(str(path)) == ["one"]
    jsonl(path, [{"prompt": "two"}])
    assert texts(str(path)) == ["two"]


def test_the_document_column_names_the_source(tmp_path):
    rows = [{"q": "a", "doc": 7}, {"q": "b", "doc": 7}, {"q": "c", "doc": None}]
    prompts, _ = sources.read(str(jsonl(tmp_path / "p.jsonl", rows)), column="q", document_column="doc")
    assert [p.source for p in prompts] == ["7", "7", "p.jsonl:3"]


def test_answers_that_came_along(tmp_path):
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": " a \n"}]
    rows = [{"q": "a", "r": "one"}, {"q": "b", "r": " "}, {"q": "c", "r": None}]
    prompts, _ = sources.read(str(jsonl(tmp_path / "p.jsonl", rows)), column="q", response_column="r")
    assert [p.response for p in prompts] == ["one", None, None]
    prompts, _ = sources.read(str(jsonl(tmp_path / "t.jsonl", [{"m": turns}])), column="m", response_column="m")
    assert [(p.text, p.response) for p in prompts] == [("u", "a")]
    with pytest.raises(CorpusError, match=r"corpus\.response_column=z is not a column of p\.jsonl"):
        sources.read(str(tmp_path / "p.jsonl"), column="q", response_column="z")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "text"),
        (["first", "second"], "first"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "u"),
        ([{"role": "assistant", "content": "a"}], None),
        ([{"role": "user", "content": [{"type": "image"}]}], None),
        ([], ""),
        (3, None),
        (None, None),
    ],
)
def test_first_turn(value, expected):
    assert sources.first_turn(value) == expected


def test_chat_turns_in_a_file(tmp_path):
    rows = [{"turns": ["first", "second"]}, {"turns": []}]
    prompts, counts = sources.read(str(jsonl(tmp_path / "p.jsonl", rows)), column="turns")
    assert [p.text for p in prompts] == ["first"]
    assert counts == {"read": 2, "kept": 1, "dropped/empty": 1}


def test_rows_without_text_are_counted(tmp_path):
    path = tmp_path / "p.parquet"
    messages = [[{"role": "user", "content": "hello"}], [{"role": "assistant", "content": "a"}], None]
    pq.write_table(pa.table({"m": messages}), path)
    prompts, counts = sources.read(str(path), column="m")
    assert [p.text for p in prompts] == ["hello"]
    assert counts == {"read": 3, "kept": 1, "dropped/not_text": 1, "dropped/empty": 1}


def test_a_missing_path_says_what_to_give():
    with pytest.raises(CorpusError) as error:
        sources.read("x.jsonl")
    assert str(error.value) == (
        "corpus.path=x.jsonl does not exist; "
        "give a JSONL, Parquet or text file, a folder of them, or a Hugging Face dataset name"
    )


def test_an_empty_path_is_not_the_working_directory():
    with pytest.raises(CorpusError, match=r"corpus.path is empty; give a JSONL"):
        sources.read("")


def test_a_dataset_that_cannot_be_had():
    with pytest.raises(CorpusError, match=r"corpus.path=nobody/nothing is no file here and does not load"):
        sources.read("nobody/nothing")


def test_a_dataset_by_name(monkeypatch):
    from datasets import Dataset

    def load(name: str, split: str) -> Dataset:
        assert (name, split) == ("some/name", "test_sft")
        return Dataset.from_dict({"prompt": ["a", "b"], "doc": ["x", "y"]})

    monkeypatch.setattr(sources, "load_dataset", load)
    prompts, _ = sources.read("some/name", split="test_sft")
    assert [p.source for p in prompts] == ["some/name:1", "some/name:2"]


def test_errors_name_key_value_and_fix(tmp_path):
    path = str(jsonl(tmp_path / "p.jsonl", [{"q": "a", "n": 1}]))
    with pytest.raises(CorpusError, match=r"corpus.column=prompt is not a column of p.jsonl .*columns are q, n"):
        sources.read(path)
    with pytest.raises(CorpusError, match=r"corpus.document_column=d is not a column .*columns are q, n"):
        sources.read(path, column="q", document_column="d")
    with pytest.raises(CorpusError, match=r"corpus.column=n holds no text in the 1 rows"):
        sources.read(path, column="n")
    (tmp_path / "bad.jsonl").write_text("{not json\n")
    with pytest.raises(CorpusError, match=r"corpus.path=.*bad.jsonl cannot be read as json"):
        sources.read(str(tmp_path / "bad.jsonl"))
    (tmp_path / "a.docx").write_text("")
    with pytest.raises(CorpusError, match=r"corpus.path=.*a.docx does not end in one of .jsonl"):
        sources.read(str(tmp_path / "a.docx"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=r"corpus.path=.*empty holds no file"):
        sources.read(str(tmp_path / "empty"))


def test_a_file_name_with_glob_characters(tmp_path):
    assert texts(str(jsonl(tmp_path / "p[1]*.jsonl", [{"prompt": "one"}]))) == ["one"]
