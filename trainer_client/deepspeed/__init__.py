"""DeepSpeed's modules and names, for scripts that are written for DeepSpeed.

Such a script changes its import and nothing else. `names` has the table of DeepSpeed's modules, and `finder` makes the
modules of the table. The other modules of this package implement functions and classes of the table that exist only for
DeepSpeed's scripts. They keep almost no state, and no other package of this library depends on them.
"""
