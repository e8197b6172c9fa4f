"""The optimizers that the store runs: one record each (optimizer.py), in the registry of those that there are."""
