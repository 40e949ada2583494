"""The iterators of datasets."""
