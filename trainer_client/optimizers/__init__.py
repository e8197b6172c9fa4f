"""The optimizers of a training loop that the store runs, and the conversion of their groups to hyper-parameters.

registry.py lists the optimizers, and hyper_parameters.py makes a row of hyper-parameters from each parameter group.
"""
