"""DeepSpeed's conversion of a checkpoint for another number of ranks, which checkpoints here do not need.

Any number of ranks can load a checkpoint of this library as it is. For scripts that convert a checkpoint before they
load it, this module writes the checkpoint's manifest once more, into the directory that the script then loads:

    python -m trainer_client.checkpoint.ds_to_universal --input_folder checkpoints/global_step20 \\
        --output_folder checkpoints/global_step20_universal

Both manifests name the same kept step, so the converted checkpoint can be loaded only until the original is removed.
This module must never change the original.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_client.training.run import checkpoint_files as files

__all__ = ["main", "parse_arguments"]

# A key of the client state. Under this key, frameworks that split tensors over ranks describe how DeepSpeed is to merge
# them. Here the key is stored and returned as any other key, because no tensor is split.
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"

log = logging.getLogger(__name__)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed arguments of DeepSpeed's converter.

    If `arguments` is None, the command line of this process is parsed.
    """
    parser = argparse.ArgumentParser(description="Write the manifest of a checkpoint into a second directory.")
    parser.add_argument("--input_folder", required=True, help="directory of the checkpoint, with its tag")
    parser.add_argument("--output_folder", required=True, help="directory that is written")
    for name, default in (("--num_extract_workers", 4), ("--num_merge_workers", 2)):
        parser.add_argument(name, type=int, default=default, help="without effect: no tensor is copied")
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help="without effect: no tensor is copied")
    return parser.parse_args(arguments)


def main(args: Any) -> None:
    """Write the manifest of `args.input_folder` to `args.output_folder`, and the file `latest_universal` beside it.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or DeepSpeed has written it.
        OSError: a file cannot be read or written.
    """
    source, target = Path(args.input_folder).absolute(), Path(args.output_folder).absolute()
    manifest = replace(files.read_manifest(source), tag=files.check_tag(target.name))
    files.write_all({target / files.MANIFEST: manifest.to_json(), target.parent / files.LATEST_UNIVERSAL: manifest.tag})
    log.info("%s names the step that %s keeps", target, source)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(parse_arguments())
