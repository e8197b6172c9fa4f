"""What ranks say to one another: collectives, whether they are in step, and who is waited for."""
