"""The nodes of a MapDataset, which turn positions into elements in two passes. They know nothing of streams."""
