"""The parts of `examples/demo.py`: its child processes, what they recorded, and the report."""
