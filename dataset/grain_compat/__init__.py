"""The names of `millstream.experimental`, which are Grain's: more datasets, and functions for user-defined datasets."""
