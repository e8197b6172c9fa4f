"""What all rooms of the engine import: its settings, errors and names, system calls, checksums, locks and waits."""
