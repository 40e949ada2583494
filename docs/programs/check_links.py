"""Asks for every address of another site that a document links to: `make links`.

An address is wrong if its server says that there is no such page, or if the name of its host is not known. Servers that
refuse programs, and those that do not answer, are only listed.
"""

import concurrent.futures
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADDRESS = re.compile(r"\]\((https?://[^)\s]+)\)")
SECONDS = 30.0
HEADERS = {"User-Agent": "Mozilla/5.0 (millstream: make links)"}
MISSING = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)


def addresses_in(documents: Iterable[Path]) -> dict[str, list[str]]:
    """Returns the documents that link to each address, in order."""
    found: dict[str, list[str]] = {}
    for document in documents:
        for address in ADDRESS.findall(document.read_text()):
            found.setdefault(address.partition("#")[0], []).append(document.name)
    return dict(sorted(found.items()))


def answer_of(address: str) -> str:
    """Returns "" if the page is there, "missing: ..." if it is not, and otherwise what prevents the check."""
    request = urllib.request.Request(address, headers=HEADERS)  # noqa: S310  (http and https alone)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):  # noqa: S310  (as above)
            return ""
    except urllib.error.HTTPError as error:
        return f"missing: {error}" if error.code in MISSING else f"not checked: {error}"
    except urllib.error.URLError as error:
        is_unknown = "not known" in str(error.reason) or "No address" in str(error.reason)
        return f"missing: {error.reason}" if is_unknown else f"not checked: {error.reason}"
    except OSError as error:
        return f"not checked: {error}"


def main(documents: Iterable[Path]) -> int:
    """Prints what is not there, and returns the number of pages that are missing."""
    found = addresses_in(documents)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = dict(zip(found, pool.map(answer_of, found), strict=True))
    for address, answer in answers.items():
        if answer:
            print(f"{address}, in {', '.join(found[address])}: {answer}")  # noqa: T201  (what it is for)
    missing = sum(answer.startswith("missing") for answer in answers.values())
    print(f"{len(found)} addresses, {missing} missing")  # noqa: T201  (as above)
    return missing


if __name__ == "__main__":
    sys.exit(main(sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])) > 0)
