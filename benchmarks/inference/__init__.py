"""Measurements of inference from the store, beside plain PyTorch and Accelerate's `disk_offload`."""
