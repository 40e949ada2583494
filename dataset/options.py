"""Options for an entire chain."""

import dataclasses
import functools
import numbers
from typing import Any, TypedDict, TypeVar

from millstream.core.checks import named_fields
from millstream.loader.pipeline.pipeline import MAX_ERRORS, FilterLimits, Tolerance

Class = TypeVar("Class", bound=type)


def _noting_given(cls: Class) -> Class:
    """Decorates a class, whose instances then have the names of the arguments that they were given, for `merge`."""
    constructor = cls.__init__  # type: ignore[misc]  # of this class

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **given: Any) -> None:
        vars(self)["_given"] = frozenset(given)
        constructor(self, *args, **given)

    cls.__init__ = construct  # type: ignore[misc]  # the signature stays as it is
    return cls


class OptionArguments(TypedDict, total=False):
    """The arguments of `IterDataset.options`."""

    on_error: str
    max_errors: int | None
    filter_warn_threshold_ratio: float | None
    filter_raise_threshold_ratio: float | None


@_noting_given
@named_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Options for an entire chain: Grain's, none of which changes the elements, and the treatment of failed records.

    The limits of filters apply to each 1,000 consecutive records that a chain reads: the share of them that is dropped
    before the first operation that batches or packs. The error at a limit comes after the remaining elements of these
    records; the next element is the one after them.

    Attributes:
        filter_warn_threshold_ratio: the share of dropped records, above 0 and up to 1, that logs a warning, once per
            iterator; None for no warning.
        filter_raise_threshold_ratio: the share of dropped records that raises a ValueError; None for no error.
        on_error: the treatment of an element for which the source, the `MapDataset` or an operation before the first
            Batch or packer raises an Exception: "raise" raises it, "skip" drops the element as a filter does, and logs
            it.
        max_errors: with on_error="skip", the number of elements that may fail before an error is raised; None for no
            limit, unless all fail.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Examples:
        >>> dataset = millstream.MapDataset.range(2000).filter(lambda x: x < 10).to_iter_dataset()
        >>> options = millstream.experimental.DatasetOptions(filter_raise_threshold_ratio=0.99)
        >>> iterator = iter(millstream.experimental.WithOptionsIterDataset(dataset, options))
        >>> [next(iterator) for _ in range(10)]
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> next(iterator)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: ... left 10 of 1000 records, ...
    """

    filter_warn_threshold_ratio: float | None = 0.9
    filter_raise_threshold_ratio: float | None = None
    on_error: str = "raise"
    max_errors: int | None = MAX_ERRORS
    _given: frozenset[str] = dataclasses.field(default=frozenset(), init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("filter_warn_threshold_ratio", "filter_raise_threshold_ratio"):
            ratio = getattr(self, name)
            is_number = isinstance(ratio, numbers.Real) and not isinstance(ratio, bool)
            if ratio is not None and not (is_number and 0 < ratio <= 1):
                raise ValueError(f"{name} must be a share above 0 and up to 1, or None, got {ratio!r}.")
        Tolerance.of(self.on_error, self.max_errors)

    @property
    def given(self) -> list[str]:
        """The names of the options that were given, in the order of the attributes."""
        return [field.name for field in dataclasses.fields(self) if field.name in self._given]

    @property
    def tolerance(self) -> Tolerance | None:
        """The maximum number of elements that may fail; None if the first error is raised."""
        return Tolerance.of(self.on_error, self.max_errors)

    @property
    def filter_limits(self) -> FilterLimits:
        """The limits of filters."""
        return FilterLimits(self.filter_warn_threshold_ratio, self.filter_raise_threshold_ratio)

    def merge(self, other: "DatasetOptions | None") -> "DatasetOptions":
        """Returns these options, with those of another object where these are defaults.

        Args:
            other: the other options; None for these alone.

        Raises:
            TypeError: other is something else.
        """
        if other is None:
            return self
        if not isinstance(other, DatasetOptions):
            raise TypeError(f"other must be DatasetOptions, or None, got {other!r} of type {type(other).__name__}.")
        given = {name: getattr(other, name) for name in other._given}  # noqa: SLF001  (of this class)
        return DatasetOptions(**{**given, **{name: getattr(self, name) for name in self._given}})


DEFAULTS = DatasetOptions()
