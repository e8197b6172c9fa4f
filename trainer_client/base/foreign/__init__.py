"""Readers of files that other programs have written, opened without trust: nothing in them is called or executed."""
