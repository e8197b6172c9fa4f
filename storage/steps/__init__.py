"""How bytes become a step and are read again: updates, commits, readers, and the repair of what is in doubt."""
