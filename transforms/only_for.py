"""Operations for the elements of one component of a mixture."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

from millstream.core.checks import named_arguments
from millstream.core.descriptions import described
from millstream.transforms.given import as_transformation
from millstream.transforms.transformation import Transformation


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
