"""The optimizers that a training loop can have the store run: one record each, in the registry of those that there
are, and their parameter groups as rows of hyper-parameters."""
