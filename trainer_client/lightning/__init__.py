"""A strategy for Lightning's `Trainer`, with an engine in the place of DistributedDataParallel."""
