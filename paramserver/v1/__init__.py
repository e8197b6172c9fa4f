"""The wire contract, version 1: messages, stubs and servicers that `make proto` generates from proto/paramserver/v1."""
