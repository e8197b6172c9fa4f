"""Connected clients: how their sessions live and end, the leases that they hold, and the runs that they form."""
