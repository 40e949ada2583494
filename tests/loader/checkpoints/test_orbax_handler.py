"""A loader's position goes through each of Orbax's interfaces, and comes back exactly or is refused."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest

import millstream
from millstream.checkpoint import CheckpointHandler, CheckpointRestore, CheckpointSave
from millstream.dataset import MapDataset
from millstream.errors import CheckpointError
from millstream.loader import DataLoader, DataLoaderIterator, ReadOptions
from millstream.loader.checkpoints import checkpointable
from millstream.loader.checkpoints.checkpointable import _read_all, encoded_state, read_states, write_state
from millstream.samplers import IndexSampler
from millstream.sources import DataSource
from millstream.transforms import Batch, Transformation
from support.draw.random_pipelines import DropMultiples, Jitter, Scale
from support.streams import equal_streams

pytestmark = [
    pytest.mark.third_party,
    # The newer interface of Orbax 0.11.20 replaces asyncio.run by one that closes no event loop.
    pytest.mark.filterwarnings("ignore:.*function BaseEventLoop.__del__:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket.socket fd=[0-9]+, family=1,:ResourceWarning"),
]

SAVED_STEP = 5


def loader(
    *,
    source: DataSource[Any] = range(40),
    seed: int = 1,
    factor: int = 2,
    drop: int | None = None,
    batch_size: int = 4,
    threads: int = 0,
) -> DataLoader:
    """Returns a loader of two epochs: twenty batches, or fewer where multiples are dropped."""
    operations: list[Transformation] = [Scale(factor), Jitter(), Batch(batch_size)]
    return DataLoader(
        data_source=source,
        sampler=IndexSampler(len(source), shuffle=True, seed=seed, num_epochs=2),
        operations=operations if drop is None else [DropMultiples(drop), *operations],
        read_options=ReadOptions(num_threads=threads),
    )


def at_step(step: int, of: DataLoader) -> DataLoaderIterator:
    iterator = iter(of)
    for _ in range(step):
        next(iterator)
    return iterator


class Interface(NamedTuple):
    """A way to save an iterator below a new folder, and to restore it. `save` calls the function before it waits."""

    name: str
    save: Callable[[Path, DataLoaderIterator, Callable[[], object]], None]
    restore: Callable[[Path, DataLoaderIterator], object]


def save_with_manager(folder: Path, iterator: DataLoaderIterator, meanwhile: Callable[[], object]) -> None:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(iterator.step, args=CheckpointSave(iterator))
        meanwhile()


def restore_with_manager(folder: Path, iterator: DataLoaderIterator) -> object:
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(manager.latest_step(), args=CheckpointRestore(iterator))


def model() -> dict[str, jax.Array]:
    return {"weights": jnp.arange(6.0).reshape(2, 3)}


def save_with_checkpointer(folder: Path, iterator: DataLoaderIterator, meanwhile: Callable[[], object]) -> None:
    """Saves with Orbax's oldest class, which waits until all is written."""
    with ocp.Checkpointer(CheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "loader", iterator)
        meanwhile()


def restore_with_checkpointer(folder: Path, iterator: DataLoaderIterator) -> object:
    with ocp.Checkpointer(CheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder / "loader", iterator)


def save_checkpointables(folder: Path, iterator: DataLoaderIterator, meanwhile: Callable[[], object]) -> None:
    """Saves beside a model with the newer interface, in the background."""
    response = ocp_v1.save_checkpointables_async(folder / "new", {"model": model(), "loader": iterator})
    meanwhile()
    response.result()


def load_checkpointables(folder: Path, iterator: DataLoaderIterator) -> object:
    """Restores with the newer interface; without the model, as Orbax forgets to await it where the loader fails."""
    return ocp_v1.load_checkpointables(folder / "new", {"loader": iterator})["loader"]


INTERFACES = [
    Interface("manager", save_with_manager, restore_with_manager),
    Interface("checkpointer", save_with_checkpointer, restore_with_checkpointer),
    Interface("v1", save_checkpointables, load_checkpointables),
]
"""The ways that call different methods of the library: in the background, in one call, and the newer interface."""
each_interface = pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.name)
each_pipeline = pytest.mark.parametrize("drop", [None, 3], ids=["one_to_one", "filtered"])


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def state_file(folder: Path) -> Path:
    (found,) = folder.rglob("process_*-of-*.json")
    return found


def assert_refused(interface: Interface, folder: Path, iterator: DataLoaderIterator) -> CheckpointError:
    """Returns the CheckpointError that a restore raises, having checked that it changes nothing."""
    before = iterator.get_state()
    with pytest.raises(Exception) as caught:  # noqa: PT011  (Orbax wraps what a handler raises)
        interface.restore(folder, iterator)
    assert iterator.get_state() == before
    return next(error for error in causes(caught.value) if isinstance(error, CheckpointError))


@each_interface
@each_pipeline
@pytest.mark.parametrize("used", [0, 9, None], ids="into_step_{}".format)
def test_a_restored_iterator_goes_on_exactly(
    interface: Interface, drop: int | None, used: int | None, tmp_path: Path
) -> None:
    """The position when `save` is called is saved; any iterator restored to it yields exactly the rest."""
    whole = list(loader(drop=drop))
    with at_step(SAVED_STEP, loader(drop=drop)) as saved:
        interface.save(tmp_path, saved, lambda: [next(saved), next(saved)])
        assert equal_streams(list(saved), whole[SAVED_STEP + 2 :])
    with at_step(len(whole) if used is None else used, loader(drop=drop)) as restored:
        assert interface.restore(tmp_path, restored) is restored
        assert restored.step == SAVED_STEP
        assert equal_streams(list(restored), whole[SAVED_STEP:])


def test_a_training_checkpointer_resumes_at_its_newest_step(tmp_path: Path) -> None:
    """The newer interface's manager of steps saves loader and model in the background, and restores both."""
    whole = list(loader())
    with at_step(0, loader()) as saved, ocp_v1.training.Checkpointer(tmp_path) as checkpointer:
        for _ in range(2):
            next(saved)
            response = checkpointer.save_checkpointables_async(saved.step, {"model": model(), "loader": saved})
            next(saved)
            assert response.result()
    with at_step(SAVED_STEP, loader()) as restored, ocp_v1.training.Checkpointer(tmp_path) as checkpointer:
        found = checkpointer.load_checkpointables(None, {"model": model(), "loader": restored})
        assert found["model"]["weights"].tolist() == model()["weights"].tolist()
        assert found["loader"] is restored
        assert restored.step == 3
        assert equal_streams(list(restored), whole[3:])


OTHER_ITERATORS: dict[str, Callable[[], Any]] = {
    "chain": lambda: iter(MapDataset.range(40).seed(3).shuffle().to_iter_dataset().batch(4)),
    "on a device": lambda: millstream.device_put(iter(loader()), buffer_size=3),
}


@each_interface
@pytest.mark.parametrize("name", OTHER_ITERATORS)
def test_other_iterators_go_on_exactly(interface: Interface, name: str, tmp_path: Path) -> None:
    """Chains and iterators on a device are saved at the step of the training loop, whatever is staged."""
    with OTHER_ITERATORS[name]() as saved, OTHER_ITERATORS[name]() as restored:
        for _ in range(SAVED_STEP):
            next(saved)
        interface.save(tmp_path, saved, lambda: None)
        next(restored)
        result: Any = interface.restore(tmp_path, restored)
        assert result is restored
        assert restored.step == SAVED_STEP
        assert [batch.tolist() for batch in restored] == [batch.tolist() for batch in saved]


def test_a_chain_needs_its_own_state(tmp_path: Path) -> None:
    """A folder without this process's state, or with one that is no JSON, is a CheckpointError that says so."""
    others = [tmp_path / f"process_{index}-of-2.json" for index in range(2)]
    for path in others:
        path.write_text("{}")
    with OTHER_ITERATORS["chain"]() as iterator:
        with pytest.raises(CheckpointError, match="holds no process_0-of-1"):
            CheckpointHandler().restore(tmp_path, CheckpointRestore(iterator))
        for path in others:
            path.unlink()
        (tmp_path / "process_0-of-1.json").write_text("not JSON")
        with pytest.raises(CheckpointError, match="not valid JSON"):
            CheckpointHandler().restore(tmp_path, CheckpointRestore(iterator))


def test_a_damaged_state_of_another_process_is_refused_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one process of a chain refused its state alone, the others would wait for it in Orbax's barrier."""
    monkeypatch.setattr(checkpointable, "jax_process", lambda: (0, 2))
    with OTHER_ITERATORS["chain"]() as iterator:
        state = encoded_state(iterator)
        write_state(tmp_path, state)
        for damaged in (b"not JSON", state.replace(b'"step": 0', b'"step": 1')):
            (tmp_path / "process_1-of-2.json").write_bytes(damaged)
            with pytest.raises(CheckpointError, match="Cannot read the state") as caught:
                CheckpointHandler().restore(tmp_path, CheckpointRestore(iterator))
            assert "process_1-of-2.json" in caught.value.__notes__[0]
        (tmp_path / "process_1-of-2.json").write_bytes(state)
        CheckpointHandler().restore(tmp_path, CheckpointRestore(iterator))


@each_interface
def test_a_state_of_another_pipeline_is_refused(interface: Interface, tmp_path: Path) -> None:
    """A changed parameter of an operation ends in a CheckpointError that names it; nothing has changed."""
    with at_step(SAVED_STEP, loader()) as saved:
        interface.save(tmp_path, saved, lambda: None)
    with at_step(2, loader(factor=3)) as other:
        assert "operations[0]" in str(assert_refused(interface, tmp_path, other))
        assert equal_streams(list(other), list(loader(factor=3))[2:])


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    """A state file that is cut short, empty, not text, a folder or gone ends in a CheckpointError."""
    interface = INTERFACES[-1]
    with at_step(SAVED_STEP, loader()) as saved, at_step(2, loader()) as iterator:
        interface.save(tmp_path, saved, lambda: None)
        file = state_file(tmp_path)
        whole = file.read_bytes()
        for damaged in (whole[:-1], whole[: len(whole) // 2], b"", b"\xff\xfe\x00", whole.replace(b"step", b"stop")):
            file.write_bytes(damaged)
            assert_refused(interface, tmp_path, iterator)
        file.unlink()
        assert "holds no loader state" in str(assert_refused(interface, tmp_path, iterator))
        file.mkdir()
        assert "Cannot read" in str(assert_refused(interface, tmp_path, iterator))
        file.rmdir()
        file.write_bytes(whole)
        interface.restore(tmp_path, iterator)
        assert equal_streams(list(iterator), list(loader())[SAVED_STEP:])


@pytest.mark.parametrize("count", [2, 128])
def test_a_state_of_another_number_of_processes_restores(count: int, tmp_path: Path) -> None:
    """Processes of a 1:1 pipeline are all at one position, so any one's state will do, once all of them are there."""
    interface = INTERFACES[0]
    with at_step(SAVED_STEP, loader()) as saved:
        interface.save(tmp_path, saved, lambda: None)
    file = state_file(tmp_path)
    whole = file.read_bytes()
    file.unlink()
    with iter(loader()) as restored:
        for index in range(1, count):
            file.with_name(f"process_{index}-of-{count}.json").write_bytes(whole)
        assert f"process_0-of-{count}.json is missing" in str(assert_refused(interface, tmp_path, restored))
        file.with_name(f"process_0-of-{count}.json").write_bytes(whole)
        interface.restore(tmp_path, restored)
        assert equal_streams(list(restored), list(loader())[SAVED_STEP:])


def test_files_that_are_no_states_do_not_matter(tmp_path: Path) -> None:
    """Only names that `write_state` gives count; an absurd number of processes in a name is not counted up to."""
    with iter(loader()) as saved:
        write_state(tmp_path, saved.get_state())
        for name in ("process_0-of-0.json", "process_00-of-1.json", "process_x-of-y.json", "process_0-of-9.json.part"):
            (tmp_path / name).write_bytes(b"")
        assert read_states(tmp_path) == [saved.get_state()]
        (tmp_path / "process_0-of-999999999.json").write_bytes(b"")
        with pytest.raises(CheckpointError, match="states of 1 and 999999999 processes"):
            read_states(tmp_path)
        (tmp_path / "process_0-of-1.json").unlink()
        with pytest.raises(CheckpointError, match=r"process_1-of-999999999\.json is missing"):
            read_states(tmp_path)


class Bucket:
    """A folder in a bucket, as Orbax passes one, whose files lie in a local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return "gs://bucket/5/loader"

    def glob(self, pattern: str) -> Iterator[Path]:
        return self.folder.glob(pattern)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name


def test_a_process_that_finds_only_its_own_state_refuses_it_in_a_bucket(tmp_path: Path) -> None:
    """All processes read the same bucket, so those whose state is there fail like the one whose state is lost.

    On a local disk, each may have its own.
    """
    own = "process_0-of-2.json"
    (tmp_path / own).write_bytes(b"{}")
    assert _read_all(tmp_path, own) == {own: b"{}"}
    for expected in (own, "process_1-of-2.json"):
        with pytest.raises(CheckpointError, match=r"process_1-of-2\.json is missing"):
            _read_all(Bucket(tmp_path), expected)


def test_differences_can_be_allowed(tmp_path: Path) -> None:
    """`allow` accepts a difference that is refused without it: here another batch size, and another seed."""
    with at_step(4, loader()) as saved:
        save_with_manager(tmp_path, saved, lambda: None)
    with ocp.CheckpointManager(tmp_path) as manager, iter(loader(batch_size=8, seed=2)) as other:
        with pytest.raises(CheckpointError, match="global_batch"):
            manager.restore(4, args=CheckpointRestore(other, allow=["sampler"]))
        manager.restore(4, args=CheckpointRestore(other, allow=["sampler", "global_batch"]))
        assert equal_streams(list(other), list(loader(batch_size=8, seed=2))[2:])
        with pytest.raises(ValueError, match="allow must be"):
            manager.restore(4, args=CheckpointRestore(other, allow=["everything"]))


@pytest.mark.parametrize("wrong", [loader(), [1, 2], None], ids=["loader", "list", "none"])
def test_what_is_no_iterator_is_refused_at_once(wrong: Any) -> None:
    """Passing the loader in place of its iterator fails at that very line, and the error says what to pass."""
    for use in (CheckpointSave, CheckpointRestore):
        with pytest.raises(TypeError, match=r"Pass .* iter\(loader\)"):
            use(wrong)


def test_a_checkpoint_can_be_looked_at(tmp_path: Path) -> None:
    """A loader and a model are saved and restored together, listed, and the model is restored without the loader."""
    args = ocp.args.Composite(model=ocp.args.StandardRestore(model()))
    with ocp.CheckpointManager(tmp_path) as manager, at_step(SAVED_STEP, loader()) as saved, iter(loader()) as restored:
        both = ocp.args.Composite(model=ocp.args.StandardSave(model()), loader=CheckpointSave(saved))
        manager.save(SAVED_STEP, args=both)
        manager.restore(SAVED_STEP, args=ocp.args.Composite(loader=CheckpointRestore(restored), **args))
        assert restored.step == SAVED_STEP
        assert {"model", "loader"} <= set(manager.item_metadata(SAVED_STEP).keys())
        assert jax.tree.all(jax.tree.map(jnp.array_equal, manager.restore(SAVED_STEP, args=args).model, model()))


@each_interface
def test_a_restored_iterator_reads_ahead(interface: Interface, tmp_path: Path) -> None:
    """While the model is being restored, the first batches are already being read, without anyone asking for them."""
    was_read = threading.Event()

    class Watched(list[int]):
        def __getitem__(self, key: Any) -> Any:
            was_read.set()
            return super().__getitem__(key)

    watched = loader(source=Watched(range(40)), threads=2)
    with at_step(SAVED_STEP, watched) as saved:
        interface.save(tmp_path, saved, lambda: None)
    was_read.clear()
    with iter(watched) as restored:
        interface.restore(tmp_path, restored)
        assert was_read.wait(timeout=60)
        assert equal_streams(list(restored), list(loader())[SAVED_STEP:])


def test_changed_code_is_refused_where_that_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`CheckpointRestore` resumes repaired code with a warning; strict=True refuses it, unless `allow` names it.

    A loader, a chain and an iterator on a device have the same arguments.
    """

    def with_code(line: str) -> Any:
        space: dict[str, Any] = {"__name__": "users_module"}
        exec(f"def step(element):\n    {line}\n    return element", space)
        return space["step"]

    def loader(line: str) -> Any:
        sampler = IndexSampler(40, num_epochs=2)
        return iter(DataLoader(data_source=range(40), sampler=sampler, operations=[with_code(line), Batch(4)]))

    def chain(line: str) -> Any:
        return iter(millstream.MapDataset.range(40).map(with_code(line)).to_iter_dataset().batch(4))

    for number, make in enumerate(
        (
            loader,
            chain,
            lambda line: millstream.device_put(loader(line)),
            lambda line: millstream.device_put(chain(line)),
        )
    ):
        folder = tmp_path / str(number)
        with make("print(end='')") as saved:  # type: ignore[no-untyped-call]
            for _ in range(SAVED_STEP):
                next(saved)
            save_with_manager(folder, saved, lambda: None)
        with ocp.CheckpointManager(folder) as manager, make("pass") as here:  # type: ignore[no-untyped-call]
            with pytest.raises(CheckpointError, match=r"operations\[0\]\.map\(\): the code has changed"):
                manager.restore(SAVED_STEP, args=CheckpointRestore(here, strict=True))
            assert here.step == 0
            manager.restore(SAVED_STEP, args=CheckpointRestore(here, allow={"operations[0].map()"}, strict=True))
            assert here.step == SAVED_STEP
            # Orbax may log warnings of its own.
            assert "the code has changed" not in caplog.text
            manager.restore(SAVED_STEP, args=CheckpointRestore(here))
            assert caplog.text.count("operations[0].map(): the code has changed") == 1
            caplog.clear()
