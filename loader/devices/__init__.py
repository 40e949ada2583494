"""Batches on devices: their transfer, and those that are transferred in advance."""
