"""Reports and traces of steps: the waits, the moved bytes, and how far the step was from the roofline."""
