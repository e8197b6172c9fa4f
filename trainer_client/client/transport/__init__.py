"""How a trainer reaches the store: the gRPC channel, the session, leases, and the data planes that carry their bytes.

This package must never know anything of models.
"""
