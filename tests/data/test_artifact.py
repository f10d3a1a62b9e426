"""A file or folder appears whole or not at all, and a fingerprint changes exactly when an identity does."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from data.artifact import atomic, differences, file_hash, fingerprint, folder_hash, publish_folder, write_json


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_failed_write_leaves_nothing(tmp_path):
    def write():
        with atomic(tmp_path / "new" / "file") as temporary:
            temporary.write_text("half")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write()
    assert names(tmp_path / "new") == []


def test_a_failed_write_leaves_the_old_content(tmp_path):
    def write():
        with atomic(tmp_path / "file") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write()
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_write_appears_at_the_end_and_leaves_no_partial_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent  # a rename is atomic within one file system only
    assert names(tmp_path) == ["file"]
    assert path.read_text() == "new"


def test_a_block_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), atomic(tmp_path / "file"):
        pass
    assert names(tmp_path) == []


def test_a_partial_file_is_never_taken_for_a_shard(tmp_path):
    with atomic(tmp_path / "shard-00000.parquet") as temporary:
        temporary.write_text("half")
        assert list(tmp_path.glob("shard-*.parquet")) == []


def test_a_fingerprint_is_the_head_of_a_sha256_over_canonical_json():
    assert fingerprint({"b": [2, "é"], "a": 1}) == hashlib.sha256('{"a":1,"b":[2,"é"]}'.encode()).hexdigest()[:16]


def test_a_fingerprint_ignores_the_order_of_keys_at_every_depth():
    assert fingerprint({"a": {"x": 1, "y": 2}, "b": 3}) == fingerprint({"b": 3, "a": {"y": 2, "x": 1}})


def test_a_fingerprint_differs_when_anything_does():
    identities = [
        {"a": 1, "b": [1, 2]},
        {"a": 2, "b": [1, 2]},
        {"a": "1", "b": [1, 2]},
        {"a": 1.5, "b": [1, 2]},
        {"a": None, "b": [1, 2]},
        {"a": True, "b": [1, 2]},
        {"a": 1, "b": [2, 1]},
        {"a": 1, "b": [1, 2, 3]},
        {"a": 1, "b": [[1, 2]]},
        {"a": 1, "c": [1, 2]},
        {"a": 1},
        {"a": 1, "b": [1, 2], "c": None},
    ]
    assert len({fingerprint(identity) for identity in identities}) == len(identities)


def test_a_file_hash_is_the_sha256_of_the_bytes(tmp_path):
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    assert file_hash(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_differences_name_nested_keys_and_both_values():
    wanted = {"seed": 1, "codec": {"top_k": 8, "deep": {"x": [1]}}, "new": {"y": 2}}
    found = {"seed": 1, "codec": {"top_k": 4, "deep": {"x": [2]}}, "gone": 3}
    assert differences(wanted, found) == [
        "codec.deep.x: [2] → [1]",
        "codec.top_k: 4 → 8",
        "gone: 3 → absent",
        "new: absent → {'y': 2}",
    ]
    assert differences(wanted, json.loads(json.dumps(wanted))) == []


def test_a_folder_is_published_whole(tmp_path):
    target = tmp_path / "below" / "model"

    def fill(folder):
        (folder / "weights").write_text("w")
        assert not target.exists()
        (folder / "config").write_text("c")

    publish_folder(target, fill)
    assert names(target) == ["config", "weights"]
    assert names(target.parent) == ["model"]


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events, sync, rename = [], os.fsync, Path.rename

    def fill(folder):
        (folder / "below").mkdir()
        (folder / "below" / "weights").write_text("w")
        (folder / "config").write_text("c")

    name = lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")).name  # noqa: E731, PTH115
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(name(descriptor)) or sync(descriptor))
    monkeypatch.setattr(Path, "rename", lambda path, to: events.append("renamed") or rename(path, to))
    publish_folder(tmp_path / "model", fill)
    moment = events.index("renamed")
    assert sorted(events[:moment]) == sorted(["weights", "below", "config", f".model.{os.getpid()}.partial"])
    assert events[moment + 1 :] == [tmp_path.name]


def test_a_failed_folder_leaves_nothing(tmp_path):
    def fill(folder):
        (folder / "weights").write_text("w")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        publish_folder(tmp_path / "model", fill)
    assert names(tmp_path) == []


def test_a_folder_that_exists_is_not_replaced(tmp_path):
    publish_folder(tmp_path / "model", lambda folder: (folder / "a").write_text("old"))
    with pytest.raises(OSError, match="model"):
        publish_folder(tmp_path / "model", lambda folder: (folder / "a").write_text("new"))
    assert names(tmp_path) == ["model"]
    assert (tmp_path / "model" / "a").read_text() == "old"


def test_json_is_pretty_in_the_given_order_and_readable(tmp_path):
    write_json(tmp_path / "x.json", {"b": "é → 1", "a": [1]})
    assert (tmp_path / "x.json").read_text() == '{\n  "b": "é → 1",\n  "a": [\n    1\n  ]\n}\n'


def test_what_is_no_json_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert names(tmp_path) == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


def fill(text):
    return lambda folder: (folder / "file").write_text(text)


def test_a_folder_is_replaced_whole(tmp_path):
    publish_folder(tmp_path / "out", fill("old"))
    (tmp_path / "out" / "more").write_text("old")
    publish_folder(tmp_path / "out", fill("new"), replace=True)
    assert [(p.name, p.read_text()) for p in (tmp_path / "out").iterdir()] == [("file", "new")]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_could_not_be_replaced_is_as_it_was(tmp_path, monkeypatch):
    publish_folder(tmp_path / "out", fill("old"))
    rename = Path.rename

    def failing(self, target):
        if self.name.endswith(".partial"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="No space"):
        publish_folder(tmp_path / "out", fill("new"), replace=True)
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_hash_of_a_folder_is_of_names_and_bytes(tmp_path):
    publish_folder(tmp_path / "a", fill("x"))
    publish_folder(tmp_path / "b", fill("x"))
    assert folder_hash(tmp_path / "a") == folder_hash(tmp_path / "b")
    (tmp_path / "b" / "file").write_text("y")
    changed = folder_hash(tmp_path / "b")
    assert changed != folder_hash(tmp_path / "a")
    (tmp_path / "b" / "file").rename(tmp_path / "b" / "other")
    assert folder_hash(tmp_path / "b") not in (changed, folder_hash(tmp_path / "a"))
