"""A script's parser gets DeepSpeed's options, and keeps its own."""

from __future__ import annotations

import argparse

from trainer_client.arguments import add_config_arguments


def test_the_options_are_deepspeeds() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)

    args = add_config_arguments(parser).parse_args(["--deepspeed", "--deepspeed_config", "ds.json", "--local_rank=1"])

    assert (args.deepspeed, args.deepspeed_config, args.local_rank) == (True, "ds.json", 1)
    assert (args.deepscale, args.deepscale_config) == (False, None)
    assert add_config_arguments(argparse.ArgumentParser()).parse_args([]).deepspeed is False


def test_the_old_names_work_and_are_not_in_the_help() -> None:
    parser = add_config_arguments(argparse.ArgumentParser())

    assert parser.parse_args(["--deepscale", "--deepscale_config", "old.json"]).deepscale_config == "old.json"
    assert "deepscale" not in parser.format_help()
    assert "--deepspeed_config" in parser.format_help()
