"""The tables of a document, row by row, and the tests that prove what the rows say."""

import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

Test = Callable[[], None]

_TESTS = Path(__file__).parents[2]
_RULE = re.compile(r"\|[-|]+\|")


def rows(document: Path, sections: Collection[str] = ()) -> list[list[str]]:
    """Returns the cells of every row of the tables in the given sections, by default in all, in order."""
    found = []
    is_below_head = False
    section = ""
    for line in document.read_text().split("\n"):
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if sections and section not in sections:
            continue
        if _RULE.fullmatch(line):
            is_below_head = True
        elif not line.startswith("|"):
            is_below_head = False
        elif is_below_head:
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


class RowTests(dict[str, Test]):
    """The tests of one document's rows, by the first cell of the row.

    Args:
        document: the document.
        laws: for each row that states the law of a test elsewhere, the name of that test. Its file may move.
        sections: those whose rows have a test each; by default all.
    """

    def __init__(self, document: Path, laws: Mapping[str, str], sections: Collection[str] = ()) -> None:
        super().__init__({row: functools.partial(_assert_is_a_test, law) for row, law in laws.items()})
        self._rows = {cells[0] for cells in rows(document, sections)}

    def of(self, first_cell: str) -> Callable[[Test], Test]:
        """Returns a decorator for the test of a row."""

        def register(test: Test) -> Test:
            assert first_cell not in self
            self[first_cell] = test
            return test

        return register

    def assert_complete(self) -> None:
        """Asserts that each row has a test, and each test a row."""
        assert self.keys() == self._rows


def _assert_is_a_test(law: str) -> None:
    assert law in _names_of_tests(), f"test_{law} does not exist"


@functools.cache
def _names_of_tests() -> set[str]:
    return {
        name
        for file in _TESTS.rglob("test_*.py")
        for name in re.findall(r"^def test_(\w+)\(", file.read_text(), re.MULTILINE)
    }
