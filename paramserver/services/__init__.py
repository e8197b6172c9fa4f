"""The two gRPC services, and what only their methods need.

A method declares the right that it asks for, converts the request and calls the engine or the sessions. It keeps no
state.
"""
