"""Lightning's face: a strategy for its `Trainer`, with an engine in the place of DistributedDataParallel."""
