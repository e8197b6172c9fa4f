"""The tiers behind one contract (`base`): host memory (an arena of shared memory) and NVMe files."""
