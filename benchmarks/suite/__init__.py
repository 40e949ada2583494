"""The parts of the benchmark suite; `python benchmarks` runs it."""
