"""What all benchmarks share: timed runs, the machine's description, and the pages of results."""
