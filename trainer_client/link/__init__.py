"""The way to the store: channel, session, leases, planes, and a daemon of the job's own. Knows nothing of models."""
