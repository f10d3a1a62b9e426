import os
import subprocess
import sys
import sysconfig
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from data import standard_library
from data.prompts import CorpusError
from data.standard_library import REQUESTS, clip

KINDS = len(REQUESTS)


def library(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def real():
    return standard_library.read()


def balanced(counts: dict[str, int]) -> bool:
    return counts["read"] == counts["kept"] + sum(n for key, n in counts.items() if key.startswith("dropped/"))


def test_the_real_library_gives_thousands_of_every_kind(real):
    prompts, counts = real
    kinds = Counter(p.kind for p in prompts)
    assert set(kinds) == set(REQUESTS)
    assert min(kinds.values()) > 2000
    assert counts["kept"] == len(prompts)
    assert counts["truncated/long"] > 0
    assert counts["dropped/short_docstring"] > 0
    assert balanced(counts)


def test_the_real_library_has_many_sources_and_no_private_or_dotted_one(real):
    sources = {p.source for p in real[0]}
    assert len(sources) > 100
    assert {"email", "json", "decimal"} <= sources
    assert not [s for s in sources if "." in s or s.startswith("_") or s in ("test", "idlelib")]


def test_another_process_reads_the_same():
    """Strings hash differently in every process, and a set could put them in another order."""
    folder = Path(sysconfig.get_path("stdlib")) / "email"
    code = f"from pathlib import Path; from data import standard_library; print(standard_library.read(Path({str(folder)!r})))"
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert said[0].strip() == str(standard_library.read(folder))


def test_what_is_skipped(tmp_path):
    doc = '"""Return the number {} of the thing."""'
    folder = library(
        tmp_path,
        {
            "good.py": f"def f(x: int = 1) -> int:\n    {doc.format(1)}\ndef _g():\n    {doc.format(2)}\n",
            "package/inner/deep.py": f"class A(dict):\n    def m(self):\n        {doc.format(3)}\n",
            "_private.py": f"def f():\n    {doc.format(4)}\n",
            "test/a.py": f"def f():\n    {doc.format(5)}\n",
            "package/tests/a.py": f"def f():\n    {doc.format(6)}\n",
            "site-packages/a.py": f"def f():\n    {doc.format(7)}\n",
            "broken.py": "def f(:\n",
            "guarded.py": f"try:\n    import x\nexcept ImportError:\n    def f():\n        {doc.format(8)}\n",
        },
    )
    prompts, counts = standard_library.read(folder)
    assert {p.source for p in prompts} == {"good", "package", "guarded"}
    assert counts["read"] == counts["kept"] == 3 * KINDS
    texts = "\n".join(p.text for p in prompts)
    assert "def f(x: int=1) -> int:" in texts
    assert "`package.inner.deep.A.m`" in texts or "`A.m`" in texts


def test_a_docstring_that_occurs_twice_is_used_once(tmp_path):
    files = {f"{name}.py": f'def {name}():\n    """Close the  file\n    at once, please."""\n' for name in "ab"}
    prompts, counts = standard_library.read(library(tmp_path, files))
    assert {p.source for p in prompts} == {"a"}
    assert counts["dropped/duplicate_docstring"] == KINDS
    assert balanced(counts)


def test_short_docstrings_are_dropped_and_long_ones_cut(tmp_path):
    long = "word " * 100
    folder = library(tmp_path, {"a.py": f'def f():\n    """{long}"""\ndef g():\n    """Short."""\n'})
    prompts, counts = standard_library.read(folder, max_characters=60)
    assert counts == {
        "read": 2 * KINDS,
        "kept": KINDS,
        "dropped/short_docstring": KINDS,
        "truncated/long": KINDS,
    }
    assert max(p.text.count("word ") for p in prompts) <= 12
    assert all("word..." in p.text for p in prompts if p.kind in ("write", "explain", "test", "example"))


@pytest.mark.parametrize(
    ("text", "longest", "expected"),
    [
        ("four", 4, "four"),
        ("one two three", 10, "one two..."),
        ("one two three", 9, "one..."),
        ("unbreakable", 8, "unbre..."),
    ],
)
def test_clip(text, longest, expected):
    assert clip(text, longest) == expected
    assert len(clip(text, longest)) <= longest


def test_the_code_itself_answers_the_request_to_write_it(tmp_path):
    inner = textwrap.dedent("""\
        class Pile:
            '''A pile of things to take from.'''

            def take(self):
                '''Take the uppermost thing.'''
                return 1
    """)
    folder = library(tmp_path, {"pile.py": f"import os\n\n{inner}"})
    prompts, _ = standard_library.read(folder, responses=True)
    answers = {p.response for p in prompts if p.kind == "write"}
    method = "def take(self):\n    '''Take the uppermost thing.'''\n    return 1"
    assert answers == {f"```python\n{inner.rstrip()}\n```", f"```python\n{method}\n```"}
    assert {p.response for p in prompts if p.kind != "write"} == {None}
    plain, _ = standard_library.read(folder)
    assert [(p.id, p.response) for p in plain] == [(p.id, None) for p in prompts]


def test_a_missing_library_is_a_corpus_error(tmp_path):
    with pytest.raises(CorpusError, match=r"corpus.source=standard_library.*corpus=dataset"):
        standard_library.read(tmp_path / "none")


def test_code_to_complete_is_the_first_half_of_functions_of_the_named_modules(tmp_path):
    body = "\n".join(f"        line_{i} = {i}" for i in range(9))
    (tmp_path / "wanted.py").write_text(f"class A:\n    def long(self):\n{body}\n\n\ndef short():\n    return 1\n")
    (tmp_path / "other.py").write_text(f"class B:\n    def long(self):\n{body}\n")
    half = "def long(self):\n" + "".join(f"    line_{i} = {i}\n" for i in range(4))
    assert standard_library.beginnings({"wanted"}, tmp_path) == [half]
    assert standard_library.beginnings({"absent"}, tmp_path) == []
