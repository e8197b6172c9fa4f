"""What a step costs, and why: what was waited for, what was moved, and how far the step was from the roofline."""
