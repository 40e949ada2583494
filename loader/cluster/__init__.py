"""Actors of a Ray cluster as workers."""
