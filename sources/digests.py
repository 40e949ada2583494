"""Digests for fingerprints."""

from typing import Any


def digest_of(described: Any, num_bytes: int) -> str:
    """Returns a digest of a value, by its `repr`: hexadecimal, of the given number of bytes."""
    import hashlib  # noqa: PLC0415  (lazy: OpenSSL takes long to import)

    return hashlib.blake2b(repr(described).encode("utf-8", "surrogatepass"), digest_size=num_bytes).hexdigest()
