"""What all other folders of the engine import: settings, errors, names, system calls, checksums, locks and waits."""
