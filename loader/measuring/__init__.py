"""Measurements of a pipeline while it runs."""
