"""A process that exports a job in each format and reports the most memory that it had; run by test_export.py.

The arguments are the store's address, a small job, the job, the directory of the exports and the file for the report.
The small job is exported first, because the code that is imported and run for the first time takes memory, too: 40 MiB
more with torch's CUDA build on Python 3.13 than with its CPU build on 3.11.
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
    address, small_job, job, directory, report = sys.argv[1:]
    for name in get_args(Format):
        export_step(address, small_job, None, Path(directory) / "small" / name, format=name)
    peaks = {"before": peak_bytes()}
    for name in get_args(Format):
        export_step(address, job, None, Path(directory) / name, format=name)
        peaks[name] = peak_bytes()
    Path(report).write_text(json.dumps(peaks))
