"""Checkpoints in the formats of other frameworks: steps of a store are written as files that these read."""
