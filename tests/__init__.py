"""Makes the name `tests` this project's: shared helpers import as `tests.<room>.<module>`.

Says how threads of OpenMP wait, for this process and those that it starts. The library reads that when torch loads it.
"""

from __future__ import annotations

import os

# By default a thread of OpenMP that has nothing to do keeps its core busy for some time. With several test processes on
# two cores, a training of two steps took 6 times the CPU time (0.8 and 0.13 s, measured). Results are the same.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
