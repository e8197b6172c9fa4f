"""The initial values of a new job: replayed recipes, the modules' own functions, or files."""
