"""The verb `paramserver launch`: its options, and the order in which the daemon and the ranks start and end."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from paramserver.contract.address import ADDRESS_VARIABLE
from paramserver.contract.printable import printable
from trainer_client.client.transport.credentials import Credentials
from trainer_client.errors import ConfigError, TrainerClientError
from trainer_client.launch.other_launchers import instead_of
from trainer_client.launch.ranks import OMP_VARIABLE, Meeting, Ranks, default_ranks, threads_for
from trainer_client.launch.store import OwnDaemon, check_operators_daemon, refuse_two
from trainer_client.training.run.local_daemon import serve_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_NODES = ("--nnodes", "--num-nodes", "--num_nodes", "--num-machines", "--num_machines")
_RANKS = ("--nproc-per-node", "--nproc_per_node", "--num-gpus", "--num_gpus")
_NODE_RANK = ("--node-rank", "--node_rank", "--machine-rank", "--machine_rank")
_MASTER = ("--master-addr", "--master_addr", "--main-process-ip", "--main_process_ip")
_PORT = ("--master-port", "--master_port", "--main-process-port", "--main_process_port")


# The settings of this command let an unknown option arrive as SCRIPT, so that `_check_program` can say what to write
# instead.
@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script, or with --module a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(*_RANKS, min=1, help="Ranks on this node. [number of GPUs, or 1]", metavar="N")
    ] = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num-processes",
            "--num_processes",
            min=1,
            help="Ranks on all nodes, as `accelerate launch` counts them.",
            metavar="N",
        ),
    ] = None,
    nnodes: Annotated[int, typer.Option(*_NODES, min=1, help="Nodes; run the command on each.", metavar="N")] = 1,
    node_rank: Annotated[
        int | None, typer.Option(*_NODE_RANK, min=0, help="Number of this node, from 0.", metavar="N")
    ] = None,
    master_addr: Annotated[str | None, typer.Option(*_MASTER, help="Host of node 0.", metavar="HOST")] = None,
    master_port: Annotated[
        int | None,
        typer.Option(*_PORT, min=1, max=65535, help="Port of node 0. [one node: a free one, else 29500]", metavar="N"),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(help="Instead of the three above: where the nodes meet, the same for all.", metavar="HOST:PORT"),
    ] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="Name of the job there. [paramserver]", metavar="NAME")] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often all ranks are started again after one has failed.", metavar="N")
    ] = 0,
    log_dir: Annotated[Path | None, typer.Option(help="A log of each rank, besides the console.")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as with `python -m`.")] = False,
    as_deepspeed: Annotated[
        bool,
        typer.Option(
            "--as-deepspeed",
            help="`import deepspeed` in the script imports this library, and the script gets --local_rank=N.",
        ),
    ] = False,
    no_local_rank: Annotated[
        bool,
        typer.Option("--no-local-rank", "--no_local_rank", help="With --as-deepspeed: leave --local_rank=N out."),
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(help=f"A store daemon that runs: unix:/path/paramserver.sock or HOST:PORT. [${ADDRESS_VARIABLE}]"),
    ] = None,
    daemon_config: Annotated[
        Path | None, typer.Option(help="Start a daemon with this TOML file of `paramserver serve`, if none serves.")
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Start a daemon with this state directory.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="Its host budget. [1GiB]", metavar="SIZE")] = None,
    nvme_budget: Annotated[str | None, typer.Option(help="Its NVMe budget. [64GiB]", metavar="SIZE")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run nothing.")] = False,
) -> None:
    """Start the ranks of a training script on this node, with a store daemon if the job needs one.

    Without a daemon's address and options, the first rank of each node starts a daemon as the script's config says
    (paramserver.state_dir or nvme_path), and stops it. With --daemon-config or --state-dir, this command starts one
    before the ranks, and stops it after them; one that serves there already is used and left running.

    Exit status: 0 if all ranks ended with 0, else that of the rank that failed first, 128 + N where signal N ended it
    or this command; 2 for wrong options, 1 if the store cannot be used.
    """
    try:
        _check_program(script, is_module=module)
        own = OwnDaemon.of(
            daemon_config,
            {
                "state-dir": None if state_dir is None else str(state_dir),
                "host-budget": host_budget,
                "nvme-budget": nvme_budget,
            },
        )
        given = address or os.environ.get(ADDRESS_VARIABLE) or None
        refuse_two(given, own, is_from_environment=address is None)
        count = _ranks_of_node(nproc_per_node, num_processes, nnodes)
        store = own.address if own is not None else given
        threads = {} if OMP_VARIABLE in os.environ else {OMP_VARIABLE: str(threads_for(count))}
        ranks = Ranks(
            ranks=count,
            meeting=Meeting(
                nodes=nnodes,
                node_rank=node_rank,
                master_addr=master_addr,
                master_port=master_port,
                rdzv_endpoint=rdzv_endpoint,
                rdzv_id=rdzv_id,
            ),
            program=[script, *(arguments or [])],
            is_module=module,
            as_deepspeed=as_deepspeed,
            passes_local_rank=not no_local_rank,
            max_restarts=max_restarts,
            log_dir=None if log_dir is None else str(log_dir),
            environment=threads | ({} if store is None else {ADDRESS_VARIABLE: store}),
        )
        # The command of the ranks is made before a daemon is started, because wrong options are found when it is made.
        command = ranks.command()
        if dry_run:
            _print_commands(own, command, ranks)
            return
        status = _run(own, given, ranks)
    except ConfigError as error:
        _fail(str(error), 2)
    except TrainerClientError as error:
        _fail(str(error), 1)
    raise typer.Exit(status)


def main(arguments: list[str]) -> None:
    """Run the verb with these arguments, and end the process with its exit status."""
    app(arguments, prog_name="paramserver launch")


def _check_program(script: str, *, is_module: bool) -> None:
    """Check that there is a script to run. Raise ConfigError if it is an option, or if there is no such file."""
    if script.startswith("-"):
        option = script.partition("=")[0]
        instead = instead_of(option)
        if instead is not None:
            raise ConfigError(f"{option} is an option of another launcher: {instead}")
        raise ConfigError(f"there is no option {option} before SCRIPT: `paramserver launch --help` lists all")
    if not is_module and not Path(script).is_file():
        raise ConfigError(f"{script} is no file: give the path of the training script, or --module and a module")


def _ranks_of_node(ranks: int | None, of_all_nodes: int | None, nodes: int) -> int:
    """Return the number of ranks on this node: `ranks` if it is given, or an equal part of `of_all_nodes`.

    It can raise ConfigError.
    """
    if of_all_nodes is None:
        return default_ranks() if ranks is None else ranks
    if ranks is not None and ranks * nodes != of_all_nodes:
        raise ConfigError(
            f"--num-processes {of_all_nodes} is not --nproc-per-node * --nnodes = {ranks} * {nodes}: leave one out"
        )
    if of_all_nodes % nodes:
        raise ConfigError(f"--num-processes {of_all_nodes} cannot be shared evenly by --nnodes {nodes}")
    return of_all_nodes // nodes


def _run(own: OwnDaemon | None, address: str | None, ranks: Ranks) -> int:
    if own is None:
        if address is not None:
            check_operators_daemon(address, Credentials.from_environment(os.environ))
        return ranks.run()
    with own.running() as started:
        if not started:
            typer.echo(f"paramserver: using the store daemon that serves at {printable(own.address)}", err=True)
        return ranks.run()


def _print_commands(own: OwnDaemon | None, command: list[str], ranks: Ranks) -> None:
    """Print the commands that would be run, as lines for a shell."""
    if own is not None and own.is_serving():
        typer.echo(f"# A store daemon serves at {own.address}; it is used.")
    elif own is not None:
        typer.echo("# Until the job ends; without a standard input that stays open, leave out --exit-with-stdin.")
        typer.echo(f"{shlex.join(serve_command(own.options))} &")
    elif ADDRESS_VARIABLE not in ranks.environment:
        typer.echo("# The first rank starts the store daemon that the script's config describes.")
    variables = [f"{name}={shlex.quote(value)}" for name, value in ranks.environment.items()]
    typer.echo(" ".join([*variables, shlex.join(command)]))


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"paramserver: {printable(message)}", err=True)
    raise typer.Exit(status)
