"""A warning about passes that repeat a random order, as a loop over epochs written for PyTorch does."""

from typing import final

from millstream.loader.operations.random_streams import seed_of
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.transforms import RandomMap
from millstream.warn import log_warning


@final
class RepeatedPasses:
    """Detects that a loader which was read to its end is read from its beginning again."""

    def __init__(self, pipeline: Pipeline) -> None:
        shuffles = seed_of(pipeline.order) is not None and getattr(pipeline.sampler, "shuffle", True)
        self._is_random = shuffles or any(isinstance(operation, RandomMap) for operation in pipeline.operations)
        self._has_ended = False

    def begin(self) -> None:
        if self._has_ended and self._is_random:
            self._is_random = False
            log_warning(
                "this loader was read to its end, and is read from its beginning again, with the "
                "same order and the same random draws. For new ones in each epoch, write: "
                "for epoch, batches in loader.epochs(10): ..."
            )

    def end(self) -> None:
        self._has_ended = True
