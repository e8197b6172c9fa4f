"""The engine, which has the verbs of a training loop."""
