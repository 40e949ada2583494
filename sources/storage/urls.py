"""Names of objects in stores far away: `gs://bucket/name`, `s3://bucket/name`, `http://host/path`, `https://host/path`.

The name of an object in a bucket is taken as it is, as `gsutil` and `aws s3` take it; a path of HTTP has its `%20`.
"""

import fnmatch
import re
from typing import NamedTuple

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
_LISTED = {"gs", "s3"}
_SCHEMES = {"gs", "s3", "http", "https"}


class Url(NamedTuple):
    """The name of one object.

    Attributes:
        scheme: `gs`, `s3`, `http` or `https`.
        root: the bucket; or host and port, and after them the query, if there is one.
        key: the name in the bucket; or the path, without percent-encoding, with its first slash.
    """

    scheme: str
    root: str
    key: str

    @classmethod
    def of(cls, name: str) -> "Url":
        """Returns the parts of a URL.

        Raises:
            ValueError: it is of another scheme, or names no object.
        """
        match = _URL.fullmatch(name)
        scheme = match[1].lower() if match else ""
        if match is None or scheme not in _SCHEMES:
            raise ValueError(f"URLs must begin with gs://, s3://, http:// or https://, got {name!r}.")
        if scheme in _LISTED:
            root, _, key = match[2].partition("/")
        else:
            import urllib.parse  # noqa: PLC0415  (takes its time)

            parsed = urllib.parse.urlsplit(name)
            root = f"{parsed.netloc}?{parsed.query}" if parsed.query else parsed.netloc
            key = urllib.parse.unquote(parsed.path)
        if not root or not key.strip("/"):
            raise ValueError(
                f"A URL must name {'a bucket' if scheme in _LISTED else 'a host'} and an object in it, got {name!r}."
            )
        return cls(scheme, root, key)

    @property
    def can_list(self) -> bool:
        """Whether its store can say which objects there are."""
        return self.scheme in _LISTED


def is_url(path: str) -> bool:
    """Returns whether a path is a URL, of whatever scheme."""
    return _URL.fullmatch(path) is not None


def without_query(url: str) -> str:
    """Returns a URL without what signs it or says who asks, which may be another each time."""
    return url.partition("?")[0] if url.startswith(("http://", "https://")) else url


class SignedUrl(str):
    """A URL of HTTP with a query, which may be a secret: what errors and logs show of it, its `repr`, is without."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(f"{without_query(str(self))}?…")


def without_secrets(words: str) -> str:
    """Returns somebody else's words without the queries of the URLs in them."""
    return _QUERY.sub(r"\1?…", words)


def matching(keys: list[str], pattern: str) -> list[str]:
    """Returns the names that a pattern matches, sorted: `*` and `?` stop at a slash, `**/` is any folders, or none."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = "".join(
        words.get(part) or (_character_class(part) if number % 2 else re.escape(part))
        for number, part in enumerate(parts)
    )
    return sorted(filter(re.compile(expression, re.DOTALL).fullmatch, keys))


def _character_class(part: str) -> str:
    """Returns the expression for `[…]` as `fnmatch` reads it."""
    return fnmatch.translate(part).removeprefix("(?s:").rpartition(")")[0]
