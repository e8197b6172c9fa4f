"""What the other rooms stand on: no training, and no call of a daemon."""
