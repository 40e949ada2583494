"""What `millstream.experimental` names, as Grain does: further datasets, and functions for those of your own."""
