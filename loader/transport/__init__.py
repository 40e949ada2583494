"""Serialization between processes: pickles, shared memory and mapped files."""
