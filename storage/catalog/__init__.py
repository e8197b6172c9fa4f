"""What is committed, in one SQLite database that proves its contents; see ../FORMAT.md."""
