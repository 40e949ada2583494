"""The arguments of `RayWorkers`, without any cluster: mistakes are found where they are made."""

import importlib.util
import pickle
import re
from typing import Any

import pytest

import millstream


def loader_of(**options: Any) -> millstream.DataLoader:
    return millstream.DataLoader(data_source=range(10), sampler=millstream.SequentialSampler(10), **options)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1, got 0"),
        ({"num_workers": 2.5}, TypeError, "num_workers must be"),
        ({"num_workers": 2, "resources_per_worker": 3}, TypeError, "must be a mapping from Ray's names"),
        ({"num_workers": 2, "resources_per_worker": {"CPU": -1}}, ValueError, "got 'CPU': -1"),
        ({"num_workers": 2, "address": 6379}, TypeError, "address must be a string"),
        ({"num_workers": 2, "address": "ray://head:10001"}, ValueError, "with address='auto'"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """At construction, with the rule and what was got."""
    with pytest.raises(error, match=re.escape(text)):
        millstream.RayWorkers(**arguments)


def test_resources_are_what_an_actor_asks_for() -> None:
    """Ray's own by its arguments, others by name; nothing is restarted by Ray, which knows no call."""
    workers = millstream.RayWorkers(2, resources_per_worker={"CPU": 0.5, "memory": 2**30, "fast_disk": 1})

    assert workers.actor_options == {
        "num_cpus": 0.5,
        "memory": 2**30,
        "resources": {"fast_disk": 1},
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    assert pickle.loads(pickle.dumps(workers)) == workers


def test_a_loader_has_processes_or_actors() -> None:
    """Not both; what it has is told, goes along when it is pickled, and nothing starts before it is iterated."""
    workers = millstream.RayWorkers(3)
    loader = pickle.loads(pickle.dumps(loader_of(workers=workers)))

    assert loader.workers == workers
    assert "3 Ray actors" in repr(loader)
    with pytest.raises(ValueError, match="worker_count must be 0 with workers=RayWorkers"):
        loader_of(workers=workers, worker_count=2)
    with pytest.raises(TypeError, match="workers must be"):
        loader_of(workers=3)


def test_without_ray_a_loader_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the loader is built, not when the first batch is due."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=re.escape("pip install 'millstream[ray]'")):
        loader_of(workers=millstream.RayWorkers(1))


def test_debug_mode_asks_for_no_actor() -> None:
    """Everything happens in the consumer's thread: there is no cluster here, and none is started."""
    with loader_of(workers=millstream.RayWorkers(3), debug=True) as loader:
        assert list(loader) == list(range(10))
        assert loader.workers is None
