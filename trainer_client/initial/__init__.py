"""The values that a new job begins with: recipes, the modules' own functions, files."""
