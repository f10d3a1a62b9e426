"""Requests about the standard library of the interpreter that runs this: real prompts on every machine, no download.

Each documented function, class and method becomes one request of every kind in ``REQUESTS``. Its source is the
top-level module, and a documentation text that occurs twice is used once, so no text reaches two splits. Files are
parsed and never imported. It knows nothing of splits or of how many prompts are wanted.
"""

import ast
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.artifact import fingerprint
from data.prompts import CorpusError, Prompt, prompt

SHORTEST = 20  # characters of documentation below which there is nothing to answer from
LONGEST_SIGNATURE = 240

_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "__pycache__"}
)
# Pure-Python twins of C modules hold the documentation; users know them by the public name.
_TWINS = {"_pydecimal": "decimal", "_pydatetime": "datetime", "_pyio": "io", "_collections_abc": "collections.abc"}

# Several wordings of each kind, so that a draft does not learn one sentence by heart.
REQUESTS: dict[str, tuple[str, ...]] = {
    "write": (
        "Implement this Python {noun} according to its docstring.\n\n{code}",
        "Write the body of `{name}` in Python. Here are its signature and documentation:\n\n{code}",
        "Complete the following {noun} so that it does what the docstring says:\n\n{code}",
    ),
    "explain": (
        "Explain in simple words what this documentation of the Python {noun} `{module}.{name}` means:\n\n{doc}",
        "I am new to Python. The documentation of `{module}.{name}` says:\n\n{doc}\n\nWhat does that mean?",
        "Summarize what the {noun} `{name}` does, for someone who has never used `{module}`:\n\n{doc}",
    ),
    "test": (
        "Write a unit test for this Python {noun} from the module `{module}`.\n\n{code}",
        "Which cases should be tested here? Write a short pytest test for `{name}`:\n\n{code}",
        "Write a `unittest.TestCase` that checks the behavior documented here:\n\n{code}",
    ),
    "purpose": (
        "What is the {noun} `{name}` in the Python module `{module}` for, and when should I use it?",
        "When would I use `{module}.{name}` in Python, and what should I watch out for?",
        "In one paragraph: what does the {noun} `{module}.{name}` of the Python standard library do?",
    ),
    "example": (
        "Show a short usage example of the Python {noun} `{module}.{name}`. Its documentation says:\n\n{doc}",
        "Give me a small example program that uses `{name}` from `{module}`, with comments.\n\n{doc}",
        "How do I call `{module}.{name}`? A few lines of Python are enough.\n\n{code}",
    ),
}


@dataclass(frozen=True)
class _Definition:
    module: str
    name: str  # qualified within the module
    noun: str
    signature: str
    doc: str
    code: str  # all of it


def read(
    folder: Path | None = None, *, max_characters: int = 400, responses: bool = False
) -> tuple[list[Prompt], dict[str, int]]:
    """All requests about the modules under ``folder`` (default: the running interpreter's standard library).

    Args:
        folder: root of the modules.
        max_characters: documentation is cut to this length at a word; such prompts count as "truncated/long".
        responses: with each request to write code, the code as it stands in the library.

    Returns:
        The prompts in a fixed order, and counts of prompts as in :class:`data.prompts.Corpus`.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    if not folder.is_dir():
        raise CorpusError(f"corpus.source=standard_library: {folder} is no folder; give prompts with corpus=dataset")
    prompts: list[Prompt] = []
    counts: Counter[str] = Counter(read=0, kept=0)
    seen: set[str] = set()
    for path, module in _modules(folder):
        tree = _parse(path)
        lines = path.read_text(encoding="utf-8").splitlines() if tree and responses else []
        for definition in _definitions(tree.body, module, lines) if tree else ():
            counts["read"] += len(REQUESTS)
            if len(definition.doc) < SHORTEST:
                counts["dropped/short_docstring"] += len(REQUESTS)
                continue
            doc = clip(definition.doc, max_characters)
            key = " ".join(doc.split()).casefold()
            if key in seen:
                counts["dropped/duplicate_docstring"] += len(REQUESTS)
                continue
            seen.add(key)
            counts["truncated/long"] += len(REQUESTS) * (doc != definition.doc)
            prompts += _requests(definition, doc)
    counts["kept"] = len(prompts)
    return prompts, dict(counts)


def beginnings(sources: Collection[str], folder: Path | None = None) -> list[str]:
    """The first half of every function of 8 to 60 lines in the top-level modules ``sources``: code to complete."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    found = []
    for path, module in _modules(folder):
        tree = _parse(path) if module.partition(".")[0] in sources else None
        lines = path.read_text(encoding="utf-8").splitlines() if tree else []
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.FunctionDef) and 8 <= (length := node.end_lineno - node.lineno + 1) <= 60:
                half = lines[node.lineno - 1 : node.lineno - 1 + length // 2]
                found.append(textwrap.dedent("\n".join(half)) + "\n")
    return found


def clip(text: str, longest: int) -> str:
    """``text``, or its first words and an ellipsis within ``longest`` characters."""
    if len(text) <= longest:
        return text
    head = text[: longest - 3]
    end = longest - 3 if text[longest - 3].isspace() else max(head.rfind(" "), head.rfind("\n"))
    return (head[:end] if end > 0 else head).rstrip() + "..."


def _modules(folder: Path) -> Iterator[tuple[Path, str]]:
    """Public modules under a folder with their dotted names, sorted by path."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if _SKIPPED & set(parts):
            continue
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        parts = (_TWINS.get(parts[0], parts[0]), *parts[1:]) if parts else ()
        if parts and all(p.replace(".", "_").isidentifier() and not p.startswith("_") for p in parts):
            yield path, ".".join(parts)


def _parse(path: Path) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in someone else's strings
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            return None


def _definitions(body: list[ast.stmt], module: str, lines: list[str], owner: str = "") -> Iterator[_Definition]:
    """Public documented definitions, those of classes and of ``if`` and ``try`` blocks included; ``lines`` of the file."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            handlers = [n for h in getattr(node, "handlers", ()) for n in h.body]
            yield from _definitions([*node.body, *handlers, *node.orelse], module, lines, owner)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            name = f"{owner}{node.name}"
            doc = ast.get_docstring(node)  # cleaned as inspect.cleandoc does
            if doc:
                code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                yield _Definition(module, name, _noun(node, owner), _signature(node), doc.strip(), code)
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, module, lines, f"{name}.")


def _noun(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
        return "property"
    return "method" if owner else "function"


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(b) for b in [*node.bases, *node.keywords])
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{keyword} {node.name}({ast.unparse(node.args)}){returns}:"
    return signature if len(signature) <= LONGEST_SIGNATURE else f"{keyword} {node.name}(...):"


def _requests(definition: _Definition, doc: str) -> Iterator[Prompt]:
    """One prompt of every kind; a hash chooses the wording."""
    body = textwrap.indent(f'"""{doc}\n"""' if "\n" in doc else f'"""{doc}"""', "    ")
    words = {
        "module": definition.module,
        "name": definition.name,
        "noun": definition.noun,
        "doc": doc,
        "code": f"```python\n{definition.signature}\n{body}\n```",
    }
    source = definition.module.partition(".")[0]
    for kind, wordings in REQUESTS.items():
        choice = int(fingerprint([definition.module, definition.name, kind]), 16) % len(wordings)
        written = f"```python\n{definition.code}\n```" if definition.code and kind == "write" else None
        yield prompt(source, kind, wordings[choice].format(**words), written)
