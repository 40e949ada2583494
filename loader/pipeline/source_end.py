"""The end of a stream whose source raises StopIteration when a record is read.

A stream in the guise of a source ends in this way. An example is a streamed dataset of Hugging Face, whose length is
unknown, and which claims more records than will ever be read. The records before the end are delivered, and the last
batch may be short. A StopIteration from anywhere else is a mistake, and an error.
"""


class SourceEnded(RuntimeError):  # noqa: N818  (an error only for a caller that reads this record alone)
    """The source has no record at this key or after it. The stream ends, in order."""

    def __init__(self, text: str = "The source raised StopIteration when a record was read.") -> None:
        super().__init__(text)


def text_of(end: SourceEnded) -> str:
    """Returns the text for the log, because the end may be a mistake."""
    where = " ".join(getattr(end, "__notes__", [])).removeprefix("millstream: in ")
    return f"{end} The stream ends there: {where}"
