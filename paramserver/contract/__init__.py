"""What the daemon and its clients share beside the generated messages: how bytes, names, tokens and updates are treated
at both ends. Imports nothing of the daemon and nothing of storage."""
