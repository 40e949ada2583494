"""Settings of worker processes, where Grain has them."""

from millstream.loader.threads.options import MultiprocessingOptions

__all__ = ["MultiprocessingOptions"]
