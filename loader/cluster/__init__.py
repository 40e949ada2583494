"""Who makes the elements in an existing distributed engine: Ray."""
