"""DeepSpeed's face: its modules, its names, and what they do that no other room does.

A script changes its import and nothing else. `names` has the table of the modules, and `finder` makes them; the other
modules here are code that the table names. They keep next to no state, and no room below uses them.
"""
