"""Runs of elements, and the operations of a pipeline as functions of them."""
