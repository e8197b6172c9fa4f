"""One rank that runs a script for DeepSpeed over this library: `as_deepspeed DIRECTORY SCRIPT ARGUMENTS`.

DIRECTORY is the script's working directory, in which the store has its state.
"""

from __future__ import annotations

import os
import sys

from trainer_client import as_deepspeed


def main() -> None:
    directory, *script = sys.argv[1:]
    os.chdir(directory)
    as_deepspeed.main(script)
