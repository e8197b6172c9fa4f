"""Checkpoints in other frameworks' formats: the export of a store's step, and the import of a checkpoint as a job."""
