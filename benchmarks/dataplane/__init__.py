"""Benchmarks of the traffic between client and daemon: leases and streams.

*Idle streams* are Reads that a client holds open without taking bytes. A *crowd*, in remote.py, is many idle streams
and one slow reader; it measures what they cost the daemon, and a client that reads at full speed beside them.
"""
