"""Makes the name `tests` this project's: shared helpers import as `tests.<room>.<module>`."""
