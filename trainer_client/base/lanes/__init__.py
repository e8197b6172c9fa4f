"""The lanes of a rank: copies between host memory and its device that run beside its computation."""
