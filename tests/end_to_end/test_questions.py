"""What the page of questions answers, checked where it can run here."""

import os
import re
import shlex
import sys

import pytest
import yaml
from kit.processes import ROOT, run_processes

from trl_padfix.cli.launch import main


PAGE = (ROOT / "docs/questions.md").read_text()
COMMANDS = [line for line in re.findall(r"```bash\n(.*?)\n```", PAGE, re.DOTALL) if line.startswith("trl-padfix")]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_trains(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    _, method, *arguments = shlex.split(command)
    arguments[arguments.index("--max_steps") + 1] = "2"
    quick = ["--eval_strategy", "no", "--eval_on_start", "false", "--logging_steps", "1", "--warmup_steps", "0"]
    main(method, [*arguments, *quick, "--output_dir", str(tmp_path), "--use_cpu", "true", "--disable_tqdm", "true"])
    assert len(re.findall(r"'padfix/shared_fraction': '?0\.[1-9]", capsys.readouterr().out)) == 2


SRUN = """#!/bin/bash
for node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait $pid || exit 1; done
"""


@pytest.mark.slow
def test_the_job_for_slurm_trains_on_two_nodes(tmp_path):
    """`srun` and `scontrol` are stood in for; both nodes are this machine, with one process on a CPU each."""
    job = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)\n```", PAGE, re.DOTALL)[1]
    accelerate = yaml.safe_load((ROOT / "recipes/accelerate/multi_gpu.yaml").read_text()) | {"mixed_precision": "no"}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(accelerate))
    here = f"--output_dir {tmp_path}/run --max_steps 2 --eval_strategy no --eval_on_start false --use_cpu true"
    for shown, run in {
        "GPUS=8": "GPUS=1",
        "recipes/accelerate/fsdp2.yaml": f"{tmp_path}/accelerate.yaml",
        "--main_process_port 29500": "--main_process_port 29517",
        "accelerate launch": f"{sys.executable} -m accelerate.commands.launch",
        "recipes/dpo.py --config recipes/dpo_qwen2.5_7b_fsdp2.yaml": (
            f"tests/kit/processes.py recipes/dpo.py --config recipes/dpo_tiny.yaml {here} --logging_steps 1 "
            "--save_strategy steps --save_steps 2"
        ),
    }.items():
        assert shown in job
        job = job.replace(shown, run)
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n", "job": job}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "HF_HUB_OFFLINE": "1"}
    done = run_processes([str(tmp_path / "job")], slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]
    logged = yaml.safe_load((tmp_path / "run/checkpoint-2/trainer_state.json").read_text())
    assert logged["epoch"] == pytest.approx(2 / 23)  # 360 pairs in steps of 8 for each of two processes
