"""The position of a chain within a state: its step, its cursor, and a number for its fingerprint.

A mixture of 64 chains would otherwise save 64 fingerprints. Like a fingerprint, the number has two parts: a different
identity is an error, different content a warning. Only the stream of the last operations is saved with its texts.
"""

import contextlib
import contextvars
import json
import zlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from millstream.core.warn import log_warning
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.compatibility import check_allow, resumption, warn_of_changes
from millstream.loader.checkpoints.envelope import unreadable
from millstream.loader.checkpoints.state import LoaderState, Stream

_ALL = ("global_batch", "on_error", "operations", "sampler", "source")
_ON_ERROR = ("on_error",)


class Accepted(NamedTuple):
    """The differences that a state may have: the arguments of `set_state`."""

    allow: frozenset[str] = frozenset()
    strict: bool = False


_NOTHING = Accepted()
_accepted: contextvars.ContextVar[Accepted] = contextvars.ContextVar("millstream_accepted", default=_NOTHING)
"""The differences that are accepted while a state is restored, in datasets below others, too."""


@contextlib.contextmanager
def accepting(allow: Collection[str], *, strict: bool) -> Iterator[None]:
    """Applies both to the iterators below that are moved inside the block, with those of outer blocks."""
    check_allow(allow, strict=strict)
    outer = _accepted.get()
    token = _accepted.set(Accepted(outer.allow.union(allow), strict or outer.strict))
    try:
        yield
    finally:
        _accepted.reset(token)


def accepted() -> Accepted:
    return _accepted.get()


def texts_of(*texts: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Returns texts by path, of a state and of this stream."""
    try:
        saved, here = ({str(path): str(text) for path, text in pairs} for pairs in texts)
    except (TypeError, ValueError) as error:
        raise unreadable(str(error)) from error
    return saved, here


def fingerprint_number(stream: Stream) -> int:
    """Returns a number of 64 bits for a stream: the CRC of its identity, and that of its content, which may change."""
    fingerprint = vars(stream.fingerprint)
    content = {name: value for name, value in fingerprint.items() if name != "identity"}
    return _number_of_identity(stream.fingerprint.identity, stream) << 32 | _crc_of(content)


def check_resumable(number: int, saved: LoaderState, here: LoaderState, stream: Stream | None) -> LoaderState:
    """Returns a state of a chain with the stream of `here`, if it can resume from it. Logs different content.

    Args:
        number: the number of the saved fingerprint.
        saved: the state, with the stream here, or the same with another length.
        here: any state of the chain that resumes.
        stream: the saved stream, if it is known.

    Raises:
        CheckpointError: the state is of another stream.
    """
    allow, strict = _accepted.get()
    if stream is not None:
        found = resumption(saved._replace(stream=stream), here, allow, strict=strict)
        if found.changes:
            warn_of_changes(found.changes)
    else:
        _check_number(number, here.stream, allow, strict=strict)
        resumption(saved, here)
    return saved._replace(stream=here.stream)


def _check_number(number: int, here: Stream, allow: Collection[str], *, strict: bool) -> None:
    identity, content = divmod(number, 1 << 32)
    own_identity, own_content = divmod(fingerprint_number(here), 1 << 32)
    # A number does not tell what differs, except for a difference that is tried.
    on_error = {"on_error": "skip"} if "on_error" not in here.fingerprint.identity else {}
    others = {name: text for name, text in here.fingerprint.identity.items() if name != "on_error"}
    is_of_other_errors = identity == _number_of_identity(others | on_error, here)
    advised = _ON_ERROR if is_of_other_errors else _ALL
    is_allowed = frozenset(_ALL).issubset(allow)
    texts = ", ".join(sorted(here.fingerprint.identity.values()))
    if identity != own_identity and not frozenset(advised).issubset(allow):
        raise CheckpointError(
            f"The state of a dataset below others belongs to another one: its identity is {identity:08x}, and here it "
            f"is {own_identity:08x}: {texts}. Build the dataset from the same source and operations as when the state "
            f"was saved, or resume with these differences on purpose: set_state(state, allow={_written(advised)})."
        )
    if content != own_content and strict and not is_allowed:
        raise CheckpointError(
            f"The code or content of a dataset below others differs from that which saved the state: {texts}. Resume "
            f"without strict=True, or with allow={_written(_ALL)}, to accept it."
        )
    if content != own_content and not is_allowed:
        log_warning(
            f"a dataset below others resumes, although its code or content differs from what saved the state: {texts}. "
            "Its elements are those that would have followed only if it computes the same."
        )


def _number_of_identity(identity: object, stream: Stream) -> int:
    return _crc_of([identity, stream.global_batch])


def _crc_of(value: object) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _written(names: Collection[str]) -> str:
    return "{" + ", ".join(f'"{name}"' for name in names) + "}"
