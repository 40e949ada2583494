"""The suite: cases, peers, the runner, and the report."""
