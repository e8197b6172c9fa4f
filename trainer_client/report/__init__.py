"""Reports and traces of steps: what was waited for, what was moved, and how far the step was from the roofline."""
