"""Benchmarks of the way between client and daemon: leases, streams and many small tensors."""
