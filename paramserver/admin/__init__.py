"""The operator's tool: one file per verb, printers apart."""
