"""The catalog: the committed jobs and steps, in one SQLite database with digests of its rows; see ../FORMAT.md."""
