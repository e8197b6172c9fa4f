"""The optimizers that the store runs: optimizer.py defines their record, and registry.py lists all records."""
