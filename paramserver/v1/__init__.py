"""The wire contract, version 1: messages, stubs and servicers that `make proto` generates from proto/paramserver/v1.
Beside them lies what the daemon and its clients share."""
