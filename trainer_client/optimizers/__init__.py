"""Optimizers as the training loop sees them: groups, hyper-parameters, and which ones the store runs."""
