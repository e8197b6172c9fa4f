"""What speaks to a store daemon."""
