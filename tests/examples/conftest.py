"""The examples start the same training several times, and compile longer than they compute."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Shares programs between the processes of these tests, which are compiled quickly instead of to be quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield
