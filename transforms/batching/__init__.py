"""Batches: stacking and padding of elements, and the operations that batch by length or rebatch."""
