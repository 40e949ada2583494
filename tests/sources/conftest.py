"""Fixtures of the tests of sources."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all examples of one law."""
    return tmp_path_factory.mktemp("folder")
