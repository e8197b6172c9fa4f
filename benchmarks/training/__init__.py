"""Benchmarks of training steps, in which contestants (processes that train the same model) take turns.

A heat is one comparison: each contestant in turn is told to make a step, round after round, so that what else runs on
the machine slows all of them alike. A standing is what a heat measured of one contestant."""
