"""Measurements of the store on the machine at hand. Nothing here asserts a speed: results are for people to judge."""
