"""The order of a plan's calls, and of their outputs."""
