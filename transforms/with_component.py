"""The component of a mixture that an element comes from, as a feature of the element."""

from collections.abc import Mapping
from typing import Any, ClassVar, final

import numpy as np

from millstream.core.checks import named_arguments
from millstream.transforms.transformation import Transformation


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
