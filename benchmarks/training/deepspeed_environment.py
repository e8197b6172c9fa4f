"""DeepSpeed's environment: its own venv with the versions of deepspeed.requirements.txt, and its compiled parts.

`prepare` sets it up once. That needs a C++ compiler, and libaio's headers for NVMe. If a part cannot be set up, the
benchmark goes on without it, and the result states the reason. As a program, it sets up the environment for tests:
`python -m benchmarks.training.deepspeed_environment DIRECTORY`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.measure import BenchmarkError, Progress

REQUIREMENTS = Path(__file__).with_name("deepspeed.requirements.txt")
# These packages are installed first, because DeepSpeed's setup.py imports torch, and its parts are compiled with the
# others.
FIRST = ("torch", "numpy", "setuptools", "wheel", "ninja")
INSTALL_SECONDS = 1200.0
BUILD_SECONDS = 1800.0
ERROR_LINES = 6

# DeepSpeed's parts in C++. Without `_build` they would be compiled at first use, which takes minutes. On an accelerator
# only the updates of offloaded states need one.
_ADAM = ("ShareMemCommBuilder", "PinMemoryBuilder", "CPUAdamBuilder", "FusedAdamBuilder")
_OFFLOADED_ADAM = ("CPUAdamBuilder",)
_NVME = ("AsyncIOBuilder",)
_BUILD = (
    "import sys; from deepspeed.accelerator import get_accelerator; "
    "[get_accelerator().create_op_builder(name).load() for name in sys.argv[1:]]"
)


class DeepSpeedUnavailableError(BenchmarkError):
    """DeepSpeed's environment cannot be set up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedEnvironment:
    """An environment that is set up.

    Attributes:
        device: the kind of device that computes, as "cpu" and "cuda".
        python: its interpreter.
        variables: environment variables for its processes.
        adam_problem: the reason why DeepSpeed's compiled Adam is missing and torch's is used; None: it is there.
        nvme_problem: the reason why DeepSpeed cannot use NVMe; None: it can.
    """

    device: str
    python: Path
    variables: Mapping[str, str]
    adam_problem: str | None
    nvme_problem: str | None


def prepare(directory: Path, progress: Progress, device: str = "cpu") -> DeepSpeedEnvironment:
    """Set up what is missing of the environment in `directory`, and return the environment.

    For an accelerator the environment has to have DeepSpeed, of any version, because which builds of torch and
    DeepSpeed fit depends on the machine.

    Raises:
        DeepSpeedUnavailableError: the packages cannot be installed, or cannot be imported on an accelerator's machine.
    """
    python, variables = interpreter(directory, device)
    if device != "cpu":
        if problem := _problem((str(python), "-c", "import deepspeed"), variables, INSTALL_SECONDS):
            raise DeepSpeedUnavailableError(f"{python} cannot import it: {problem}")
    elif not is_installed(directory):
        _install(directory.absolute(), python, progress)
    return DeepSpeedEnvironment(
        device=device,
        python=python,
        variables=variables,
        adam_problem=_build(python, variables, _ADAM if device == "cpu" else _OFFLOADED_ADAM, progress),
        nvme_problem=_build(python, variables, _NVME, progress) if device == "cpu" else "it was not set up",
    )


def interpreter(directory: Path, device: str = "cpu") -> tuple[Path, Mapping[str, str]]:
    """Return the Python of the environment in `directory`, and environment variables for its processes."""
    directory = directory.absolute()
    # DeepSpeed cannot read architectures with a letter, as 9.0a, which this variable may have on machines for Hopper.
    architecture = "{}.{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else ""
    return directory / "bin" / "python", {
        "DS_ACCELERATOR": device,
        **({"TORCH_CUDA_ARCH_LIST": architecture} if architecture else {}),
        "TORCH_EXTENSIONS_DIR": str(directory / "extensions"),
        "PATH": f"{directory / 'bin'}:{os.environ.get('PATH', os.defpath)}",
    }


def is_installed(directory: Path) -> bool:
    """Return whether the environment exists in `directory` with the required version of DeepSpeed."""
    python, variables = interpreter(directory)
    if not python.exists():
        return False
    wanted = {line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("deepspeed==")}
    listed = subprocess.run(
        [python, "-m", "pip", "freeze"], env=os.environ | dict(variables), capture_output=True, text=True, check=False
    )
    return wanted <= set(listed.stdout.splitlines())


def _install(directory: Path, python: Path, progress: Progress) -> None:
    progress("DeepSpeed: setting up its environment, once")
    shutil.rmtree(directory, ignore_errors=True)
    pip = (str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
    for command in (
        (sys.executable, "-m", "venv", str(directory)),
        (*pip, "--constraint", str(REQUIREMENTS), *FIRST),
        (*pip, "--no-build-isolation", "--requirement", str(REQUIREMENTS)),
    ):
        if problem := _problem(command, {"DS_BUILD_OPS": "0"}, INSTALL_SECONDS):
            raise DeepSpeedUnavailableError(problem)


def _build(python: Path, variables: Mapping[str, str], parts: tuple[str, ...], progress: Progress) -> str | None:
    """Compile and load parts of DeepSpeed. Return None, or the reason why that failed."""
    progress(f"DeepSpeed: its compiled parts {', '.join(parts)}: minutes, once")
    # An interrupted build leaves its lock behind, for which the next build would wait forever.
    for lock in Path(variables["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
        lock.unlink()
    return _problem((str(python), "-c", _BUILD, *parts), variables, BUILD_SECONDS)


def _problem(command: tuple[str, ...], variables: Mapping[str, str], timeout_seconds: float) -> str | None:
    """Run a command. Return None, or the end of its output if it failed."""
    try:
        subprocess.run(
            command,
            env=os.environ | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_seconds,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(command[:4])} took longer than {timeout_seconds:g} s"
    except FileNotFoundError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return " | ".join(line.strip() for line in error.stdout.splitlines()[-ERROR_LINES:])
    return None


def main() -> None:
    """Set up the environment in the directory that the first argument names; exit with the reason if Adam is missing.

    The second argument is the kind of device, "cpu" without it.

    Raises:
        DeepSpeedUnavailableError: the packages cannot be installed.
    """
    environment = prepare(Path(sys.argv[1]), lambda line: print(line, flush=True), *sys.argv[2:3])
    if environment.adam_problem is not None:
        raise SystemExit(f"DeepSpeed's Adam cannot be compiled: {environment.adam_problem}")


if __name__ == "__main__":
    main()
