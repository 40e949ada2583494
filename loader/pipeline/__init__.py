"""The content and order of a stream. Nothing here knows threads, processes or time."""
