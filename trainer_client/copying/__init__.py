"""Whole steps of jobs, copied bit for bit: from daemon to daemon, into a backup, and from a backup into a daemon."""
