"""The bounded number of open files, against files that count."""

import errno
import functools
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.sources.files import open_files
from millstream.sources.files.open_files import OpenFiles, descriptor_share
from support.faults.memory_limits import limited
from support.processes.forked import text_after_fork


class Disk:
    """Opens files, up to a number of descriptors, and knows which are open."""

    def __init__(self, descriptors: int = 1000) -> None:
        self.open: list[str] = []
        self.opened: list[str] = []
        self.descriptors = descriptors
        self.lock = threading.Lock()

    def open_file(self, path: str) -> "File":
        """Returns an open file."""
        with self.lock:
            if len(self.open) >= self.descriptors:
                raise OSError(errno.EMFILE, "Too many open files", path)
            if path == "missing":
                raise FileNotFoundError(errno.ENOENT, "No such file", path)
            self.open.append(path)
            self.opened.append(path)
        return File(self, path)


class File:
    """Open until closed, and closed once only."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk = disk
        self.path = path
        self.is_open = True

    def close(self) -> None:
        assert self.is_open
        self.is_open = False
        with self.disk.lock:
            self.disk.open.remove(self.path)


def use(files: OpenFiles[File], disk: Disk, *paths: str) -> None:
    """Acquires files and releases them, one after another."""
    for path in paths:
        files.acquire(path, disk.open_file)
        files.release(path)


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.sampled_from("abcdef")))
def test_the_last_used_files_stay_open(max_open: int, paths: list[str]) -> None:
    """One after the other, the files open are the `max_open` last used ones; only others are opened anew."""
    disk = Disk()
    files = OpenFiles[File](max_open)
    recent: list[str] = []
    for path in paths:
        opened = len(disk.opened)
        file = files.acquire(path, disk.open_file)
        assert file.path == path
        assert file.is_open
        files.release(path)
        assert len(disk.opened) == opened + (path not in recent)
        recent = [path, *(other for other in recent if other != path)][:max_open]
        assert sorted(disk.open) == sorted(recent)
    files.close()
    assert disk.open == []


def test_files_in_use_stay_open_beyond_the_bound() -> None:
    """The bound never closes a file that is being read; it takes hold again when the files are idle."""
    disk = Disk()
    files = OpenFiles[File](1)
    held = [files.acquire(path, disk.open_file) for path in "abc"]
    assert all(file.is_open for file in held)
    for path in "abc":
        files.release(path)
    use(files, disk, "d")
    assert disk.open == ["d"]


def test_idle_files_make_room_when_descriptors_run_out() -> None:
    """Out of descriptors, idle files are closed one by one, and then those of others; with none, it is an error."""
    disk = Disk(descriptors=2)
    files, others = OpenFiles[File](100), OpenFiles[File](100)
    use(others, disk, *"xy")
    files.acquire("a", disk.open_file)
    use(files, disk, *"bcd")
    assert disk.open == ["a", "d"]
    files.release("a")
    use(files, disk, *"c")
    assert disk.open == ["a", "c"]
    use(files, disk, *"d")
    files.acquire("c", disk.open_file)
    files.acquire("d", disk.open_file)
    with pytest.raises(OSError, match="Too many open files"):
        files.acquire("e", disk.open_file)
    files.release("c")
    assert files.acquire("e", disk.open_file).is_open


def test_a_file_that_does_not_open_is_tried_again() -> None:
    """A failure leaves nothing behind: the next attempt opens afresh."""
    disk = Disk(descriptors=0)
    files = OpenFiles[File](4)
    for path in ("a", "missing"):
        with pytest.raises(OSError, match="Too many"):
            files.acquire(path, disk.open_file)
    disk.descriptors = 1
    with pytest.raises(FileNotFoundError):
        files.acquire("missing", disk.open_file)
    assert files.acquire("a", disk.open_file).is_open
    assert len(files) == 1


def test_close_waits_for_the_last_user() -> None:
    """After `close`, nothing opens; what is in use is closed by its last release."""
    disk = Disk()
    files = OpenFiles[File](4)
    files.acquire("a", disk.open_file)
    files.acquire("a", disk.open_file)
    use(files, disk, "b")
    files.close()
    files.close()
    assert disk.open == ["a"]
    with pytest.raises(ValueError, match="closed"):
        files.acquire("a", disk.open_file)
    files.release("a")
    assert disk.open == ["a"]
    files.release("a")
    assert disk.open == []
    assert files.closed


def test_threads_share_files_that_are_open_while_used() -> None:
    """Under contention no one ever holds a closed file, and in the end no more than the bound are open."""
    disk = Disk(descriptors=10)
    files = OpenFiles[File](3)

    def is_open(number: int) -> bool:
        path = "abcdefgh"[(number * 5 + number // 7) % 8]
        file = files.acquire(path, disk.open_file)
        try:
            return file.is_open and file.path == path
        finally:
            files.release(path)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(is_open, range(4000)))
    use(files, disk, "a")
    assert len(disk.open) == len(files) <= 3
    files.close()
    assert disk.open == []


def test_sources_share_half_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 descriptors, one source keeps 20 files open and two keep 10 each, until one of them is closed."""
    # Sources of earlier tests may still wait for the collector.
    monkeypatch.setattr(open_files, "_registry", functools.cache(open_files._Registry))
    disk, one, other = Disk(), OpenFiles[File](100), OpenFiles[File](100)

    def open_all(files: OpenFiles[File]) -> int:
        use(files, disk, *map(str, range(30)))
        return len(files)

    with limited(resource.RLIMIT_NOFILE, 40):
        assert descriptor_share() == 20
        assert open_all(one) == 20
        assert (open_all(other), len(one)) == (10, 10)
        one.close()
        assert (open_all(other), len(disk.open)) == (20, 20)
    other.close()


def test_a_forked_process_opens_files_of_its_own() -> None:
    """A forked process neither waits for files that were in use at the fork, nor closes them."""
    disk, files = Disk(), OpenFiles[File](1)
    held = files.acquire("a", disk.open_file)
    opening, go_on = threading.Event(), threading.Event()

    def open_slowly(path: str) -> File:
        opening.set()
        go_on.wait(60)
        return disk.open_file(path)

    thread = threading.Thread(target=files.acquire, args=("b", open_slowly))
    thread.start()
    opening.wait(60)

    def read() -> Any:
        own = [files.acquire(path, disk.open_file) for path in "ab"]
        return own[0] is not held, held.is_open, disk.open

    assert text_after_fork(read) == "(True, True, ['a', 'a', 'b'])"
    go_on.set()
    thread.join()
    for path in "ab":
        files.release(path)
    files.close()
    assert disk.open == []
