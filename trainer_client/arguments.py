"""DeepSpeed's arguments on a script's command line.

This module owns the names of the options. It must never read the options' values: `initialize(args=...)` does that.
"""

from __future__ import annotations

import argparse
from typing import TypeVar

__all__ = ["add_config_arguments"]

_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)


def add_config_arguments(parser: _Parser) -> _Parser:
    """Add DeepSpeed's options to a parser, and return it.

    `--deepspeed_config` is the path of the config, which `initialize(args=...)` reads. `--deepspeed` is a flag for the
    script itself. Old scripts call the two `--deepscale_config` and `--deepscale`; these work and are not in the help.
    As in DeepSpeed, `--local_rank` is not among them: a script whose launcher passes it adds it by itself.
    """
    group = parser.add_argument_group("DeepSpeed", "the training config")
    group.add_argument(
        "--deepspeed", action="store_true", help="say that the script shall use its engine; initialize() ignores it"
    )
    group.add_argument("--deepspeed_config", metavar="PATH", default=None, help="the JSON file of the config")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, help=argparse.SUPPRESS)
    return parser
