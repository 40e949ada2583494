"""What a MapDataset is made of: nodes, which turn positions into elements in two passes, and know of no streams."""
