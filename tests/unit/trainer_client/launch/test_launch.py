"""The commands that `paramserver launch` makes of its options, and the options that it refuses."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trainer_client.launch.cli import app
from trainer_client.launch.other_launchers import instead_of

SCRIPT = str(Path(__file__).parents[4] / "examples" / "train_gpt2.py")


def launch(*arguments: str, **environment: str) -> Result:
    cleared = {"PARAMSERVER_ADDRESS": "", "OMP_NUM_THREADS": "3"}
    return CliRunner().invoke(app, list(arguments), env=cleared | environment)


def torchrun_arguments(result: Result) -> list[str]:
    """Return the arguments of torchrun in the last line that a dry run has printed."""
    assert result.exit_code == 0, result.output
    words = shlex.split(result.stdout.splitlines()[-1])
    return words[words.index("torch.distributed.run") + 1 :]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--nproc-per-node 2", "--standalone --nproc-per-node 2"),
        ("--num_gpus=3", "--standalone --nproc-per-node 3"),
        (
            "--nnodes 2 --node-rank 1 --master-addr first --num_processes 8",
            "--nnodes 2 --node-rank 1 --master-addr first --master-port 29500 --nproc-per-node 4",
        ),
        (
            "--num_machines 2 --rdzv-endpoint first:1234 --nproc-per-node 1",
            "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint first:1234 --rdzv-id paramserver --nproc-per-node 1",
        ),
        (
            "--master-port 4000 --nproc-per-node 1 --max-restarts 2",
            "--nnodes 1 --node-rank 0 --master-addr 127.0.0.1 --master-port 4000 --nproc-per-node 1 --max-restarts 2",
        ),
    ],
)
def test_the_options_become_those_of_torchrun(options: str, expected: str) -> None:
    result = launch(*options.split(), "--dry-run", SCRIPT, "--steps", "3", "--help")

    assert torchrun_arguments(result) == [*expected.split(), SCRIPT, "--steps", "3", "--help"]
    assert "The first rank starts the store daemon" in result.stdout


def test_a_script_can_be_run_as_deepspeeds() -> None:
    result = launch("--nproc-per-node", "1", "--as-deepspeed", "--dry-run", SCRIPT, "--x")

    assert torchrun_arguments(result)[3:] == ["-m", "trainer_client.as_deepspeed", "--local_rank", SCRIPT, "--x"]


def test_a_script_that_takes_no_number_of_its_rank_gets_none() -> None:
    options = ["--nproc-per-node", "1", "--as-deepspeed", "--no_local_rank"]

    assert torchrun_arguments(launch(*options, "--dry-run", SCRIPT))[3:] == [
        "-m",
        "trainer_client.as_deepspeed",
        SCRIPT,
    ]


def test_a_daemon_of_the_launch_is_printed_with_its_options(tmp_path: Path) -> None:
    config = tmp_path / "daemon.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\nsocket = "{tmp_path}/its.sock"\n')

    options = ["--daemon-config", str(config), "--host-budget", "64MiB", "--dry-run", "--nproc-per-node", "1", SCRIPT]
    lines = launch(*options, PARAMSERVER_SERVE_SOCKET="/elsewhere").stdout.splitlines()

    # The variable would have the daemon listen where the ranks do not look for it, but a flag wins over it.
    assert (
        f" --socket {tmp_path}/its.sock --config {config} --host-budget 64MiB --state-dir {tmp_path}/state &"
        in lines[1]
    )
    assert lines[2].startswith(f"PARAMSERVER_ADDRESS=unix:{tmp_path}/its.sock ")


def test_threads_are_shared_out_unless_the_environment_says_so() -> None:
    mine = launch("--nproc-per-node", "1000", "--dry-run", SCRIPT, OMP_NUM_THREADS="7")
    result = CliRunner(env={"OMP_NUM_THREADS": None}).invoke(app, ["--nproc-per-node", "1000", "--dry-run", SCRIPT])

    assert "OMP_NUM_THREADS" not in mine.stdout
    assert "OMP_NUM_THREADS=1 " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2", SCRIPT], "--nnodes 2 needs --node-rank (0 to 1"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", SCRIPT], "is not below --nnodes 2"),
        (["--node-rank", "1", SCRIPT], "give --nnodes, too"),
        (["--rdzv-endpoint", "a:1", "--master-addr", "a", SCRIPT], "choose one way"),
        (["--rdzv-id", "a", SCRIPT], "needs --rdzv-endpoint"),
        (["--num-processes", "3", "--nnodes", "2", SCRIPT], "cannot be shared evenly"),
        (["--num-processes", "3", "--nproc-per-node", "2", SCRIPT], "leave one out"),
        (
            ["--hostfile", "hosts", SCRIPT],
            "--hostfile is an option of another launcher: start the",
        ),
        (["--include=a:0", SCRIPT], "CUDA_VISIBLE_DEVICES"),
        (["--nonsense", SCRIPT], "there is no option --nonsense before SCRIPT"),
        (["missing.py"], "missing.py is no file"),
        (["--module", "--as-deepspeed", "package.train"], "--as-deepspeed runs a script"),
        (["--host-budget", "1GiB", SCRIPT], "give --state-dir DIRECTORY"),
        (["--daemon-config", "/missing.toml", SCRIPT], "/missing.toml cannot be read"),
        (["--address", "unix:/a", "--state-dir", "b", SCRIPT], "remove one"),
        (["--state-dir=~/store", SCRIPT], "state directory '~/store': only a shell replaces ~ by a home directory"),
    ],
)
def test_options_that_cannot_be_honoured_are_named_with_a_remedy(arguments: list[str], message: str) -> None:
    result = launch("--dry-run", *arguments)

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_configuration_of_the_daemon_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    config = tmp_path / "daemon.toml"
    config.write_bytes('state_dir = "/data/f\xfcr alle"'.encode("latin-1"))

    result = launch("--daemon-config", str(config), "--dry-run", SCRIPT)

    assert result.exit_code == 2
    assert f"--daemon-config {config} is not TOML: " in result.stderr


def test_names_of_other_launchers_are_known_in_either_spelling() -> None:
    assert instead_of("--launcher_args") == instead_of("--launcher-args") is not None
    assert instead_of("--nproc") is None
