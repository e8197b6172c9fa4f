"""The benchmark of verification: the NVMe tier's checksums alone, on one thread, over pieces of equal size."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.common.measure import GB, CpuStopwatch, Sample, summary
from storage.base.integrity import Checksums

BUFFER_BYTES = 64 << 20


def run(rounds: int, read_cpu_seconds_per_gb: float, piece_bytes: int) -> dict[str, Any]:
    """Record and verify checksums of pieces of `piece_bytes`, `rounds` times after a warm-up, and return the figures.

    In the result, `share_of_read_cpu` is the part of `read_cpu_seconds_per_gb`, the CPU time of a read through the
    tier, that verification takes.
    """
    data = memoryview(np.random.default_rng(1).bytes(BUFFER_BYTES))
    pieces = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    checksums = [Checksums(f"piece {i}", len(piece)) for i, piece in enumerate(pieces)]
    record, verify = [], []
    for _ in range(rounds + 1):
        with CpuStopwatch() as watch:
            for known, piece in zip(checksums, pieces, strict=True):
                known.record(0, piece)
        record.append(watch.sample(len(data)))
        with CpuStopwatch() as watch:
            for known, piece in zip(checksums, pieces, strict=True):
                known.verify(0, piece)
        verify.append(watch.sample(len(data)))
    return {
        "piece_bytes": piece_bytes,
        "record": summary(record[1:]),
        "verify": summary(verify[1:]),
        "share_of_read_cpu": round(_cpu_per_gb(verify[1:]) / read_cpu_seconds_per_gb, 4),
    }


def _cpu_per_gb(samples: list[Sample]) -> float:
    return statistics.median(sample.cpu_seconds / (sample.nbytes / GB) for sample in samples)
