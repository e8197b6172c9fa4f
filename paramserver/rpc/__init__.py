"""What every RPC passes through: checks of requests, status codes, and conversion between messages and engine types."""
