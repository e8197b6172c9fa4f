"""The tiers behind their contracts (`contract`): host memory (an arena of shared memory) and NVMe files."""
