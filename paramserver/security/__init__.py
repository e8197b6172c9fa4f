"""Who may do what: the gate for every call, tokens, certificates, and quotas of jobs."""
