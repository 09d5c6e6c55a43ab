"""
Several processes at once, as a shell would launch them.

As a script it is what they run. `accelerate launch tests/kit/processes.py kit.MODULE ARGS` calls `main(*ARGS)` of a
module of the kit, and writes what that returns to `logged.json` in the folder that the first argument names;
`accelerate launch tests/kit/processes.py SCRIPT ARGS` runs a script. Each process ends as [`leave`] does.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import psutil
import yaml


__all__ = ["ROOT", "accelerated", "launched", "leave", "logged", "on_gpus", "run_processes", "trained"]

ROOT = Path(__file__).parents[2]


def run_processes(command: list[str], environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess:
    """The output of a launcher's processes; processes that wait for each other are ended, with return code -9."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, said = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # The launcher starts each process in a session of its own: no group holds them all.
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
        output, said = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output, said)


def accelerated(strategy: str, config: Path, *target: Any, flags: Sequence[str] = (), **settings: Any) -> list[str]:
    """`accelerate launch` of two processes in float32, with a configuration of `recipes/accelerate` and `settings`."""
    name = "multi_gpu" if strategy == "tensor_parallel" else strategy  # which the model itself sees to
    given = yaml.safe_load((ROOT / f"recipes/accelerate/{name}.yaml").read_text())
    given |= {"num_processes": 2, "mixed_precision": "no"} | settings
    config.write_text(yaml.safe_dump({name: value for name, value in given.items() if value is not None}))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", 0]
    return [str(part) for part in (*command, *flags, __file__, *target)]


def launched(
    strategy: str, folder: Path, *target: Any, timeout: float = 300, env: dict[str, str] | None = None, **given: Any
) -> subprocess.CompletedProcess:
    """
    Run `target` (see above) as [`accelerated`] says, its configuration in `folder`. accelerate takes processes on CPU
    for DDP only: for any other strategy they pass for GPUs, which talk through gloo.
    """
    environment = {"DS_ACCELERATOR": "cpu", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    environment |= {} if strategy == "multi_gpu" else {"ACCELERATE_TORCH_DEVICE": "cpu"}
    command = accelerated(strategy, folder / "accelerate.yaml", *target, **given)
    return run_processes(command, environment | (env or {}), timeout)


def trained(*args: Any, **kwargs: Any) -> str:
    """The output of [`launched`], which has to succeed."""
    done = launched(*args, **kwargs)
    last = [line for line in done.stderr.splitlines() if line.endswith(" begins")][-1:]
    assert done.returncode != -signal.SIGKILL, f"the processes wait for each other: {last} {done.stderr[-2000:]}"
    assert done.returncode == 0, f"{last} {done.stderr[-6000:]}"
    return done.stdout


def logged(strategy: str, folder: Path, module: str, *arguments: Any, **given: Any) -> dict[str, Any]:
    """Results of `main(folder, *arguments)` of a module of the kit, run in several processes."""
    trained(strategy, folder, module, folder, *arguments, **given)
    found = json.loads((folder / "logged.json").read_text())
    assert found.pop("distributed") == {"multi_gpu": "MULTI_CPU", "fsdp2": "FSDP"}.get(strategy, "DEEPSPEED")
    return found


def on_gpus() -> bool:
    """Whether this process pretends to run on a GPU."""
    return os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu"


def leave() -> NoReturn:
    """
    End a process that has done its part, at once: a thread of gloo that wants the GIL while the interpreter ends calls
    `std::terminate` (pytorch/pytorch#179291, #190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(target: str, *arguments: str) -> None:
    if on_gpus():
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    if target.endswith(".py"):
        sys.argv = [target, *arguments]
        runpy.run_path(target, run_name="__main__")
        return
    from accelerate.state import AcceleratorState
    from torch import distributed

    found = import_module(target).main(*arguments)
    if found is not None and int(os.environ["RANK"]) == 0:
        found = {"distributed": AcceleratorState().distributed_type.value, **found}
        Path(arguments[0], "logged.json").write_text(json.dumps(found))
    if distributed.is_initialized():
        distributed.barrier()


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    run(*sys.argv[1:])
    leave()
