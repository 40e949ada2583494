"""Checkpoints: states, fingerprints, and Orbax."""
