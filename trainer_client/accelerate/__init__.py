"""Accelerate's `Accelerator`, with an engine in the place of DistributedDataParallel and the optimizer."""
