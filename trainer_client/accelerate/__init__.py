"""Accelerate's face: its `Accelerator` with an engine in the place of DistributedDataParallel and the optimizer."""
