"""Optimizer kernels: elementwise updates of the states in host buffers, one file each, bit-equal to torch.optim."""
