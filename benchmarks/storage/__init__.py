"""Benchmarks of the engine and its tiers, beside fio."""
