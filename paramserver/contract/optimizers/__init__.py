"""The optimizers that the store runs: optimizer.py has the class that describes one, registry.py lists all."""
