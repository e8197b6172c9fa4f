"""A trainer's way to the store: channel, session, leases and the planes that carry bytes. Knows nothing of models."""
