"""The two gRPC services and what only their methods need. A method checks rights, converts and calls; it keeps no
state."""
