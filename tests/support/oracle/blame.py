"""The operation and the element that an error must name, as an oracle knows them."""

import functools
from collections.abc import Callable
from typing import Any


def blame(error: BaseException, operation: str = "", place: str = "") -> None:
    """Sets the operation, and the place of the element, that the notes of an error must name, unless they are set."""
    found = vars(error)
    if operation:
        found.setdefault("_operation", operation)
    if place:
        found.setdefault("_place", place)


def blame_record(error: BaseException, source: str, key: int) -> None:
    """Sets the source and the record that an error must name."""
    blame(error, source)
    vars(error)["_key"] = key


def blaming(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a method of an operation whose errors must name the class of the operation."""

    @functools.wraps(method)
    def call(element: Any) -> Any:
        try:
            return method(element)
        except Exception as error:
            # A method that was passed as a function has only a name of its own.
            own = type(method.__self__)  # type: ignore[attr-defined]  # of a method
            blame(error, f"({own.__name__}|map_batch)")
            raise

    return call


def blame_part(error: BaseException, number: int) -> None:
    """Adds the number of the dataset, of several, that has failed. Sources that are read together have none."""
    found = vars(error)
    if "_operation" in found and not found["_operation"].endswith("Source"):
        found.setdefault("_parts", []).append(f"dataset ('part )?{number}'? of")


def blamed_for(error: BaseException) -> tuple[str, ...]:
    """Returns the words that must be in the notes of an error. Errors of a join itself need none."""
    found = vars(error)
    if "_operation" not in found:
        return ()
    # A mixture that is read with random access says where the record lies in its source.
    key = found.get("_key")
    place = found["_place"] if key is None else f"({found['_place']}|record key {key}|its record {key})"
    return found["_operation"], place, *found.get("_parts", ())
