"""Benchmarks of the storage engine and its tiers, compared with fio."""
