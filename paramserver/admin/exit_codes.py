"""The exit statuses of `paramserver-admin`, which docs/admin.md lists."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """The exit statuses of the verbs, by which scripts tell what has happened."""

    DONE = 0
    """The verb did what it says."""

    FAILED = 1
    """The daemon refused the call or could not do it, no daemon answered, or the question was answered with no; or the
    output could not be written."""

    USAGE = 2
    """The command line is wrong, or a file that it names cannot be used."""

    SOME_FAILED = 3
    """Of several daemons, some did what the verb says, and others did not."""

    BAD_STATE = 4
    """The verb was carried out, and found a bad state: damage, or a daemon that is not ready to stop."""

    INTERRUPTED = 130
    """Ctrl-C, or the program that read the output has ended."""
