"""The parts of `examples/demo.py`: its child processes, their journals, the verdict and the report."""
