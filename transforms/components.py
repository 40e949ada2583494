"""Operations for the components of a mixture: for the elements of one, and the number of the component as a feature."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np

from millstream.core.checks import named_arguments
from millstream.core.descriptions import described
from millstream.transforms.base import Transformation
from millstream.transforms.given import as_transformation


@final
class OnlyFor(Transformation):
    """Applies operations to the elements of one component of a mixture. Other elements pass unchanged.

    It belongs in a pipeline whose sampler is a `MixtureSampler`, before the first Batch.

    Args:
        component: the component's name; its number if the mixture was built from lists.
        operations: one operation or function, or a list of them, without a Batch.

    Attributes:
        component: as passed.
        operations: the operations, in order, functions wrapped in Maps.

    Raises:
        TypeError: an operation is not one, or is a Batch or an OnlyFor; the component is neither text nor an integer.
        ValueError: there is no operation.

    Examples:
        >>> operations = [millstream.OnlyFor("books", str.upper), millstream.Batch(4)]
        >>> sources = {"web": ["a", "b", "c"], "books": ["x"]}
        >>> loader = millstream.load(sources, weights={"web": 0.75, "books": 0.25}, transformations=operations)
        >>> next(iter(loader))
        array(['a', 'X', 'b', 'c'], dtype='<U1')
    """

    is_complete: ClassVar[bool] = True

    @named_arguments()
    def __init__(
        self,
        component: str | int,
        operations: Transformation | Callable[[Any], Any] | Sequence[Transformation | Callable[[Any], Any]],
    ) -> None:
        if isinstance(component, bool) or not isinstance(component, (str, int)):
            raise TypeError(f"component must be the name or the number of a component, got {component!r}.")
        self.component = component
        given = operations if isinstance(operations, Sequence) else [operations]
        self.operations = tuple(map(as_transformation, given))
        if not self.operations:
            raise ValueError(f"OnlyFor({component!r}, ...) needs at least one operation, got none.")
        for operation in self.operations:
            if operation.gathers or isinstance(operation, OnlyFor):
                raise TypeError(
                    f"OnlyFor takes Maps, RandomMaps, MapWithIndex, Filters, FlatMaps and functions, because it works "
                    f"element by element, got {described(operation)}."
                )

    @property
    def keeps_count(self) -> bool:  # type: ignore[override]  # of one operation, not of the class
        """True if all of the operations are 1:1."""
        return all(operation.keeps_count for operation in self.operations)

    @property
    def num_random(self) -> int:  # type: ignore[override]  # as above
        """The number of random operations among them."""
        return sum(operation.num_random for operation in self.operations)

    def __repr__(self) -> str:
        return f"OnlyFor({self.component!r}, [{', '.join(map(described, self.operations))}])"


def leaves(operation: Transformation) -> tuple[Transformation, ...]:
    return operation.operations if isinstance(operation, OnlyFor) else (operation,)


@final
class WithComponent(Transformation):
    """Adds the number of its component to each element, for a loss per corpus.

    It belongs in a pipeline whose sampler is a `MixtureSampler`, before the first Batch. The number is the index of the
    component's name in `sampler.names`. It is part of the stream: a component that is added to the mixture later keeps
    the numbers of the others if it comes after them.

    Packed rows have it per row, per token or per document:

        per row         `WithComponent(name)` after `Pack`, if a mixture has rows of one component each
        per token       `WithComponent(name, like="tokens")` before the packer, with `name` in length_struct and in
                        meta_features
        per document    `WithComponent(name)` before a packer such as `FirstFitPack`, with `name` in meta_features only:
                        a row has a list of them

    Args:
        name: the name of the new feature. Elements are dicts.
        like: the name of a feature that has one entry per token: the new one has as many entries. None for a number.

    Attributes:
        name: as passed.
        like: as passed.

    Raises:
        TypeError: a name is not text. While reading, an element is not a dict.
        ValueError: while reading, an element has the feature already, or lacks `like`.

    Examples:
        >>> corpora = {"web": [{"id": 0}, {"id": 1}, {"id": 2}], "books": [{"id": 9}]}
        >>> operations = [millstream.transforms.WithComponent("corpus")]
        >>> loader = millstream.load(corpora, weights=[3, 1], transformations=operations, batch_size=4)
        >>> next(iter(loader))
        {'id': array([0, 9, 1, 2]), 'corpus': array([0, 1, 0, 0], dtype=int32)}
        >>> loader.sampler.names
        ('web', 'books')
    """

    is_complete: ClassVar[bool] = True

    @named_arguments()
    def __init__(self, name: str, *, like: str | None = None) -> None:
        for argument, value in (("name", name), ("like", like)):
            if not isinstance(value, str) and (argument == "name" or value is not None):
                raise TypeError(
                    f"{argument} must be the name of a feature, got {value!r} of type {type(value).__name__}."
                )
        self.name, self.like = name, like

    def __repr__(self) -> str:
        return f"WithComponent({self.name!r}{'' if self.like is None else f', like={self.like!r}'})"

    def added(self, number: int, element: Any) -> dict[str, Any]:
        """Returns an element with the number of its component."""
        if not isinstance(element, Mapping):
            raise TypeError(
                f"WithComponent({self.name!r}) needs elements that are dicts, got {type(element).__name__}."
            )
        if self.name in element:
            raise ValueError(f"WithComponent({self.name!r}) needs a name that elements do not have. Use another one.")
        if self.like is None:
            return {**element, self.name: np.int32(number)}
        if self.like not in element:
            raise ValueError(f"WithComponent(like={self.like!r}) names no feature: elements have {', '.join(element)}.")
        return {**element, self.name: np.full(len(element[self.like]), number, np.int32)}
