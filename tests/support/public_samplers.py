"""The public samplers, for tests that need a case of each."""

from typing import Any

from millstream import samplers


def public_samplers() -> dict[str, type[Any]]:
    """Returns the classes of samplers that users construct, by name; no protocols."""
    named = {name: getattr(samplers, name) for name in samplers.__all__}
    return {
        name: kind
        for name, kind in named.items()
        if hasattr(kind, "record_keys_at") and not getattr(kind, "_is_protocol", False)
    }
