"""The end of a stream that its source decides: by StopIteration, where a record was asked for.

So a stream in the guise of a source says that it has ended: one of Hugging Face, say, whose length nobody knows, and
which claims to have more records than anybody will read. What came before it is delivered, and the last batch may be
short. A StopIteration from anywhere else is a mistake, and an error.
"""


class SourceEnded(RuntimeError):  # noqa: N818  (for whoever asks for this record alone, it is an error)
    """There is no record where one was asked for, nor after it: the end of the stream, at its turn."""

    def __init__(self, text: str = "The source raised StopIteration where a record was asked for.") -> None:
        super().__init__(text)


def text_of(end: SourceEnded) -> str:
    """Returns what to say in the log: the end may be a mistake."""
    where = " ".join(getattr(end, "__notes__", [])).removeprefix("millstream: in ")
    return f"{end} The stream ends there: {where}"
