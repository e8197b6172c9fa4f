"""Connected clients: the life of their sessions, the leases that sessions hold, and the runs that sessions form."""
