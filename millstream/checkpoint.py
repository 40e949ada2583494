"""Saving and restoring a loader's position with Orbax: the public door to `millstream.loader.checkpoint`."""

from millstream.loader.checkpoint import CheckpointHandler, CheckpointRestore, CheckpointSave

__all__ = ["CheckpointHandler", "CheckpointRestore", "CheckpointSave"]
