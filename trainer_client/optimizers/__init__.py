"""The optimizers that the store runs for a training loop, one record each, and their groups as rows.

registry.py has the records, hyper_parameters.py makes rows of hyper-parameters of the groups.
"""
