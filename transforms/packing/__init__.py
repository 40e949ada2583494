"""Packers: operations that build rows of a fixed length from documents of different lengths."""
