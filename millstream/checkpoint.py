"""Saving and restoring a loader's position with Orbax."""

from millstream.loader.checkpoints.orbax_handler import CheckpointHandler, CheckpointRestore, CheckpointSave

__all__ = ["CheckpointHandler", "CheckpointRestore", "CheckpointSave"]
