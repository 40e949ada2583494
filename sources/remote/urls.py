"""URLs of objects in remote stores.

They are `gs://bucket/name`, `s3://bucket/name`, `az://container/name`, `hf://datasets/org/name@revision/path`,
`http://host/path` and `https://host/path`. The name of an object in a bucket is literal, as in `gsutil` and `aws s3`. A
path of HTTP is percent-encoded.
"""

import fnmatch
import re
from collections.abc import Callable
from typing import NamedTuple

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_IN_TEXT = re.compile(r"(https?://)(?:[^\s/?#'\"]*@)?([^\s?#'\"]+)([?#][^\s'\"]*)?", re.IGNORECASE)
"""A URL of HTTP in a text. The groups omit the user; the last one is the query and fragment."""

_LISTED = {"gs", "s3", "az", "hf"}
_CONTAINERS = {
    "http": "a host and an object in it",
    "https": "a host and an object in it",
    "hf": "a file of a dataset, hf://datasets/ORG/NAME/PATH",
}
_SCHEMES = {*_LISTED, "http", "https"}


class Url(NamedTuple):
    """The parsed URL of an object.

    The root is the bucket; `datasets/org/name@revision`; or the host and port, followed by the query if there is one.
    The key is the name in the bucket; or the decoded path, with its first slash.
    """

    scheme: str
    root: str
    key: str

    @classmethod
    def of(cls, name: str) -> "Url":
        match = _URL.fullmatch(name)
        scheme = match[1].lower() if match else ""
        if match is None or scheme not in _SCHEMES:
            raise ValueError(
                f"URLs must begin with gs://, s3://, az://, hf://, http:// or https://, got {canonical(name)!r}."
            )
        if scheme == "hf":
            root, key = _split_hub_path(match[2])
        elif scheme in _LISTED:
            root, _, key = match[2].partition("/")
        else:
            import urllib.parse  # noqa: PLC0415  (lazy: it takes long to import)

            parsed = urllib.parse.urlsplit(name)
            root = f"{parsed.netloc}?{parsed.query}" if parsed.query else parsed.netloc
            key = urllib.parse.unquote(parsed.path)
        if not root or not key.strip("/"):
            raise ValueError(
                f"A URL must name {_CONTAINERS.get(scheme, 'a bucket and an object in it')}, got {canonical(name)!r}."
            )
        return cls(scheme, root, key)

    @property
    def can_list(self) -> bool:
        return self.scheme in _LISTED


def is_url(path: str) -> bool:
    """Returns True if a path is a URL, of any scheme."""
    return "://" in path and _URL.fullmatch(path) is not None


def without_query(url: str) -> str:
    """Returns a URL without the parts that may be secret or change: user, password, query and fragment.

    The scheme is in lower case. Names in buckets have none of these parts, and stay unchanged.
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
    """Returns a URL with its scheme in lower case, as a `SecretUrl` if a part may be secret."""
    scheme, separator, rest = url.partition("://")
    url = f"{scheme.lower()}{separator}{rest}"
    return url if url == without_query(url) else SecretUrl(url)


def with_other_name(path: str, change: Callable[[str], str]) -> str:
    """Returns a path or URL with another name and the same query, which may be a signature for both names.

    `change` gets and returns a path without query and fragment.
    """
    if not is_url(path) or path.partition("://")[0].lower() in _LISTED:
        return change(path)
    end = re.search(r"[?#]|$", path)
    stop = end.start() if end else len(path)
    return canonical(change(path[:stop]) + path[stop:])


class SecretUrl(str):
    """A URL of HTTP with parts that may be secret. Errors and logs show its `repr`, which omits them."""

    __slots__ = ()

    def __repr__(self) -> str:
        plain = without_query(str(self))
        scheme, _, rest = plain.partition("://")
        host = re.split(r"[/?#]", self.partition("://")[2], maxsplit=1)[0]
        shown = plain if "@" not in host else f"{scheme}://…@{rest}"
        return repr(f"{shown}{'?…' if '?' in self else '#…' if '#' in self else ''}")


def without_secrets(text: str) -> str:
    """Returns a text of another library without the parts of URLs that may be secret."""
    return _IN_TEXT.sub(lambda match: f"{match[1]}{match[2]}{'?…' if match[3] else ''}", text)


def matching(keys: list[str], pattern: str) -> list[str]:
    """Returns the sorted names that match a glob. As for files, only a whole component `**` matches slashes."""
    *folders, name = pattern.split("/")
    expression = "".join("(?:.*/)?" if folder == "**" else f"{_expression(folder)}/" for folder in folders)
    expression += ".*" if name == "**" else _expression(name)
    return sorted(filter(re.compile(expression, re.DOTALL).fullmatch, keys))


def _expression(pattern: str) -> str:
    """Returns the regular expression for a glob without a slash."""
    tokens = re.split(r"(\*+|\?|\[[^\]]+\])", pattern)
    for number, token in enumerate(tokens):
        if not number % 2:
            tokens[number] = re.escape(token)
        elif token.startswith("["):
            tokens[number] = "(?!/)" + fnmatch.translate(token).removeprefix("(?s:").rpartition(")")[0]
        else:
            tokens[number] = "[^/]*" if "*" in token else "[^/]"
    return "".join(tokens)


def _split_hub_path(path: str) -> tuple[str, str]:
    """Splits the path of a URL into the dataset, `datasets/ORG/NAME@REVISION`, and the path of the file in it.

    Both are empty if the path is not of this form.
    """
    names = path.split("/", 3)
    if len(names) < 4 or names[0] != "datasets" or not all(names):
        return "", ""
    return "/".join(names[:3]), names[3]
