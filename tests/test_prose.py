"""The words of the library: docstrings, texts of parameters, errors and help follow the rules of plain English.

A reader should get the field's noun first. So no docstring and no text of a parameter begins with a question word, and
phrases that make a native reader stop do not occur.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("millstream", "dataset", "loader", "samplers", "sources", "tools", "transforms")

QUESTION_WORDS = r"(What|Who|Whose|Whom|Whether|Where|Which|How)\b"
PHRASES = [
    rf"\bReturns {QUESTION_WORDS.replace('(What', '(?i:What', 1)}",
    r"\b(anew|nobody|somebody|whoever|beneath)\b",
    r"\b(as ever|at hand|for good|without end|in vain|all the same|most often|takes? note|took note)\b",
    r"\b(laid|lay|lies|lying|lays|laying) end to end\b",
    r"\b(taken|takes|take|took) away\b",
    r"\b(None|True|False) where\b",
    r"\bwhere (there|it|they) (is|are|may)\b",
    r"\b(those|that|one) of which\b",
    r", (say|perhaps)\b",
    r"\bat once\b",
    r"\bthose who look\b",
    r"\b[Ss]ome (records|elements|values|files|blocks|positions|keys|batches)\b",
    r"\b(is|are|was|were|be|been) (told|said|asked)\b",
    r"\bwhat (is|was|are|were) (told|said|asked|known|made|read|left|given)\b",
]
"""Phrases that occur in no text. `at once` is either *immediately* or *together*."""
IDENTIFIERS = r"^_?(MOST|LEAST|FEW|most|least)_"
"""Bounds are called `MAX_X` and `MIN_X`."""
ALL_PURPOSE = r"(\w*_)?(place|places|look|words|part|parts|piece|pieces|picture|many|some|which|going_on)_*"
"""Identifiers that name nothing: a position, a path, a segment, a description has a name of its own."""
OWN_TERMS = {
    "parts": {"samplers/balanced.py", "samplers/mixtures/mixture.py", "sources/concatenated.py"},
    "mix_words": {"millstream/core/randomness.py"},
    "n_words": {"millstream/core/randomness.py"},
    "num_parts": {"millstream/sharding.py"},
    "place": {f"loader/engine/{name}.py" for name in ("auto", "crew", "engine", "places")},
    "piece": {"sources/pieces.py"},
    "pieces": {"sources/pieces.py"},
    "_pieces": {"sources/arrow/tables.py", "sources/concatenated.py", "sources/files/multi_file.py"},
    "words": {"millstream/core/philox_state.py", "millstream/core/randomness.py", "samplers/permutation.py"},
}
"""The modules in which such a name is the term of the field, 64-bit words, or a public attribute."""


class Text(NamedTuple):
    line: int
    kind: str
    text: str


def texts_of(source: str) -> Iterator[Text]:
    """Yields the docstrings, attribute docstrings, comments and messages of a module."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, statement in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    is_first = before is None or isinstance(before, (ast.Assign, ast.AnnAssign))
                    yield Text(statement.lineno, "docstring" if is_first else "string", text)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(node.lineno, "string", node.value)
    for number, line in enumerate(source.splitlines(), 1):
        if (comment := re.search(r"(?:^|\s)#\s(.*)", line)) is not None:
            yield Text(number, "comment", comment[1])


def prose_violations(source: str) -> list[str]:
    """Returns the violations of the rules in one module, each with its line."""
    found = set()
    for line, kind, text in texts_of(source):
        if kind != "comment" and re.match(QUESTION_WORDS, text.strip()):
            found.add((line, f"begins with a question word: {text.strip()[:60]!r}"))
        for name, described in re.findall(r"^\s+(\w+): (\w+)", text, re.MULTILINE) if kind != "comment" else ():
            if re.fullmatch(QUESTION_WORDS, described, re.IGNORECASE):
                found.add((line, f"the text of {name} begins with {described!r}"))
        found |= {
            (line, f"{match[0]!r}") for phrase in PHRASES for match in re.finditer(phrase, " ".join(text.split()))
        }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) if re.match(IDENTIFIERS, name):
                found.add((node.lineno, f"the name {name}"))
    return [f"line {line}: {words}" for line, words in sorted(found)]


def all_purpose_names(source: str) -> set[tuple[int, str]]:
    """Returns the lines at which a module defines an all-purpose name, and the names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add((node.lineno, name))
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add((node.lineno, name))
    return {(line, name) for line, name in found if re.fullmatch(ALL_PURPOSE, name, re.IGNORECASE)}


MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_words_of_a_module_are_plain() -> None:
    """No text of a module begins with a question word or has a phrase that makes a reader stop."""
    found = {str(path): prose_violations(path.read_text()) for path in MODULES}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_no_docstring_begins_with_a_question_word() -> None:
    """Docstrings of tests, benchmarks, examples and programs of the documentation begin with the noun, too."""
    found = [
        (path.relative_to(ROOT).as_posix(), line, text[:40])
        for folder in ("benchmarks", "docs", "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, kind, text in texts_of(path.read_text())
        if kind == "docstring" and re.match(QUESTION_WORDS, text.strip())
    ]
    assert found == []


def test_names_say_what_they_name() -> None:
    """No module defines an all-purpose name, unless it is the field's own term there."""
    allowed = {(path, name) for name, paths in OWN_TERMS.items() for path in paths}
    found = {
        (path.relative_to(ROOT).as_posix(), name.lower())
        for path in MODULES
        for _, name in all_purpose_names(path.read_text())
    }
    assert found == allowed
    for definition in ("def look(): ...", "class _Part: ...", "def f(words): ...", "is_place = 1", "self._pieces = []"):
        assert all_purpose_names(definition)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('"""What a thing is."""', "question word"),
        ('def f():\n    """Whether it is."""', "question word"),
        ('X = 1\n"""How many there are."""', "question word"),
        ('def f(a):\n    """Does it.\n\n    Args:\n        a: whether it does.\n    """', "text of a"),
        ('def f():\n    """Returns what it has."""', "Returns what"),
        ('raise ValueError("it is made\\nanew")', "anew"),
        ("# None where it fails", "None where"),
        ("_MOST_BYTES = 1", "_MOST_BYTES"),
        ("def f(most_bytes): ...", "most_bytes"),
    ],
)
def test_violations_are_found(source: str, words: str) -> None:
    """Each kind of violation is found in each kind of text."""
    assert any(words in violation for violation in prose_violations(source))


def test_every_test_states_its_law() -> None:
    """Each test of each file has a docstring."""
    tests = [
        (path, function)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_")
    ]

    assert len(tests) > 1000
    assert [(path.name, function.name) for path, function in tests if not ast.get_docstring(function)] == []
