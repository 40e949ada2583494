"""Which formats there are: each once, read by the class that it names."""

from collections import Counter
from importlib import import_module

import pytest

import millstream
from millstream.sources.formats import FORMATS, FileFormat


def test_each_format_is_listed_once() -> None:
    """No two formats have a name, an extension or a class in common."""
    for words in (
        [kind.name for kind in FORMATS],
        [kind.source for kind in FORMATS],
        [ending for kind in FORMATS for ending in kind.extensions],
    ):
        assert [word for word, count in Counter(words).items() if count > 1] == []


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_format_names_the_class_that_users_know(kind: FileFormat) -> None:
    """The class that opens files of a format is the public one of that name."""
    assert getattr(import_module(f"millstream.sources.{kind.module}"), kind.source) is getattr(millstream, kind.source)
