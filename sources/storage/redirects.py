"""Where servers of HTTP send those who ask for an object, which TensorStore does not follow.

What a server says is remembered in this process, so that the next requests go there at once. Such an address may be
good for a while only, so it is asked for again when it is refused.
"""

import re
from typing import final

from millstream.errors import DataSourceError

_REDIRECTION = re.compile(r"HTTP code 30[12378]\b")

_REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED", "FAILED_PRECONDITION")


@final
class Redirects:
    """The addresses that URLs lead to. Any number of threads may ask."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}

    def address_of(self, url: str) -> str:
        """Returns where to ask for an object, as far as is known."""
        return self._addresses.get(url, url)

    def follow(self, url: str, words: str, seconds: float) -> bool:
        """Asks the server where an object is, if that may be why a request failed; returns whether to ask again.

        Args:
            url: the name of the object.
            words: TensorStore's words for what failed.
            seconds: how long it may take.

        Raises:
            DataSourceError: the server sends in circles, to no address of HTTP, or does not answer.
        """
        is_stale = self._addresses.pop(url, None) is not None and words.startswith(_REFUSED)
        if not (is_stale or _REDIRECTION.search(words)):
            return False
        import urllib.error  # noqa: PLC0415  (takes its time)
        import urllib.request  # noqa: PLC0415

        request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})  # noqa: S310  (it is one of HTTP)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310
                self._addresses[url] = answer.url
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 416:  # It is empty, and there.
                raise DataSourceError(f"{url!r} leads elsewhere, and from there nowhere: {error}.") from error
            self._addresses[url] = error.url
        except OSError as error:
            raise DataSourceError(f"{url!r} leads elsewhere, and from there nowhere: {error}.") from error
        return True
