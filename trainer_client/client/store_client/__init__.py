"""The public client for programs that do not train: put, commit, read and watch tensors (see docs/store-client.md)."""
