"""The parts that all benchmarks share: timed runs, the description of the machine, and the pages of results."""
