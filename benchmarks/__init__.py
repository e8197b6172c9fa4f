"""Benchmarks of the store on the machine at hand. No benchmark asserts a speed; people judge the results."""
