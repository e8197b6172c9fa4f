"""A process that exports a job in each format and reports the most memory that it had; run by test_export.py.

The arguments are the store's address, the job, the directory of the exports and the file for the report.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import get_args

from trainer_client.exchange.export import Format, export_step


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    address, job, directory, report = sys.argv[1:]
    peaks = {"before": peak_bytes()}
    for name in get_args(Format):
        export_step(address, job, None, Path(directory) / name, format=name)
        peaks[name] = peak_bytes()
    Path(report).write_text(json.dumps(peaks))
