"""Names of objects in remote stores.

They are `gs://bucket/name`, `s3://bucket/name`, `az://container/name`, `http://host/path` and `https://host/path`. The
name of an object in a bucket is taken as it is, as `gsutil` and `aws s3` take it; a path of HTTP has its `%20`.
"""

import fnmatch
import re
from collections.abc import Callable
from typing import NamedTuple

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_IN_TEXT = re.compile(r"(https?://)(?:[^\s/?#'\"]*@)?([^\s?#'\"]+)([?#][^\s'\"]*)?", re.IGNORECASE)
"""A URL in a text, in groups without its user, and with its query and fragment in the last one."""

_LISTED = {"gs", "s3", "az"}
_SCHEMES = {*_LISTED, "http", "https"}


class Url(NamedTuple):
    """The name of one object.

    Attributes:
        scheme: `gs`, `s3`, `az`, `http` or `https`.
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
            raise ValueError(f"URLs must begin with gs://, s3://, az://, http:// or https://, got {canonical(name)!r}.")
        if scheme in _LISTED:
            root, _, key = match[2].partition("/")
        else:
            import urllib.parse  # noqa: PLC0415  (takes its time)

            parsed = urllib.parse.urlsplit(name)
            root = f"{parsed.netloc}?{parsed.query}" if parsed.query else parsed.netloc
            key = urllib.parse.unquote(parsed.path)
        if not root or not key.strip("/"):
            raise ValueError(
                f"A URL must name {'a bucket' if scheme in _LISTED else 'a host'} and an object in it, got "
                f"{canonical(name)!r}."
            )
        return cls(scheme, root, key)

    @property
    def can_list(self) -> bool:
        """Whether its store can say which objects there are."""
        return self.scheme in _LISTED


def is_url(path: str) -> bool:
    """Returns whether a path is a URL, of whatever scheme."""
    return "://" in path and _URL.fullmatch(path) is not None


def without_query(url: str) -> str:
    """Returns a URL without what may be a secret or differ each time: user, password, query and fragment.

    Its scheme is in lower case. Names in buckets have none of these, and stay as they are.
    """
    match = _URL.fullmatch(url)
    if match is None:
        return url
    scheme, rest = match[1].lower(), match[2]
    if scheme not in _LISTED:
        host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
        rest = f"{host.rpartition('@')[2]}{slash}{path}"
    return f"{scheme}://{rest}"


def canonical(url: str) -> str:
    """Returns a URL with its scheme in lower case, as a `SecretUrl` if a part of it may be a secret."""
    scheme, separator, rest = url.partition("://")
    url = f"{scheme.lower()}{separator}{rest}"
    return url if url == without_query(url) else SecretUrl(url)


def with_other_name(path: str, change: Callable[[str], str]) -> str:
    """Returns a path or URL whose name is changed; a query stays after it, so that what signs it signs both.

    Args:
        path: the path or URL.
        change: returns another path for a path without query and fragment.
    """
    if not is_url(path) or Url.of(path).can_list:
        return change(path)
    place = re.search(r"[?#]|$", path)
    stop = place.start() if place else len(path)
    return canonical(change(path[:stop]) + path[stop:])


class SecretUrl(str):
    """A URL of HTTP with a part that may be a secret. Errors and logs show its `repr`, which leaves that part out."""

    __slots__ = ()

    def __repr__(self) -> str:
        plain = without_query(str(self))
        scheme, _, rest = plain.partition("://")
        host = re.split(r"[/?#]", self.partition("://")[2], maxsplit=1)[0]
        shown = plain if "@" not in host else f"{scheme}://…@{rest}"
        return repr(f"{shown}{'?…' if '?' in self else '#…' if '#' in self else ''}")


def without_secrets(words: str) -> str:
    """Returns the text of another library without what may be a secret in its URLs."""
    return _IN_TEXT.sub(lambda match: f"{match[1]}{match[2]}{'?…' if match[3] else ''}", words)


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
