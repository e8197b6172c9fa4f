"""Authentication and authorisation: the gate that checks every call, tokens, certificates, and quotas of jobs."""
