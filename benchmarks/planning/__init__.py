"""Predictions of `paramserver plan` beside measurements, for eight small jobs on CPUs."""
