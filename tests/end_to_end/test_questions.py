"""What the page of questions answers, checked where it can run here."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import trl
import yaml
from kit.methods import make_trainer
from kit.observe import entered_tokens
from kit.processes import ROOT, run_processes
from kit.trainer_runs import MODES, build_model, build_pairs, lora
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from transformers import AutoModelForCausalLM
from zoo.models import build

import trl_padfix
from trl_padfix import remove_padding
from trl_padfix.cli.launch import main


PAGE = (ROOT / "docs/questions.md").read_text()
COMMANDS = [line for line in re.findall(r"```bash\n(.*?)\n```", PAGE, re.DOTALL) if line.startswith("trl-padfix")]


def trained_adapters(library, folder: Path, **config):
    """The trainer after three steps of DPO with LoRA."""
    given = {"peft_config": lora(task_type="CAUSAL_LM")}
    given |= {"train_dataset": build_pairs(8, prompt=(2, 12), answer=(1, 9))}
    trainer = make_trainer(library, "DPO", folder, **{"max_steps": 3, "learning_rate": 1e-2} | given | config)
    trainer.train()
    return trainer


def test_merged_adapters_are_trls_and_go_on_without_padding(tmp_path):
    trainer = trained_adapters(trl_padfix, tmp_path / "ours", **MODES["prefix sharing"])
    merged = trainer.model.merge_and_unload()
    theirs = trained_adapters(trl, tmp_path / "trl").model.merge_and_unload().state_dict()
    before = build_model().state_dict()
    ours = merged.state_dict()
    assert ours.keys() == theirs.keys() == before.keys()
    assert any((ours[name] - before[name]).abs().max() > 1e-3 for name in ours)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-5)

    merged.save_pretrained(tmp_path / "merged")
    assert "padfix" not in (tmp_path / "merged/config.json").read_text()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 9, 39, 39], [5, 6, 7, 3, 39]])
    mask = (ids != 39).long()
    handle = trainer.padding.handle
    computed = handle.stats.packed_tokens
    with torch.no_grad():
        wanted, found = (model.eval()(ids, attention_mask=mask).logits for model in (plain, merged))
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)
    assert handle.stats.packed_tokens - computed == 7  # 12 real tokens, of which 5 repeat a prefix
    trainer.restore_padding()
    assert not any("forward" in vars(module) for module in merged.model.modules())


def test_flash_attention_alone_computes_the_padding_in_every_other_layer():
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 39, 39, 39]])
    mask = (ids != 39).long()
    with flash_attention_stand_in() as calls, torch.no_grad():
        model = build("qwen2", "flash_attention_2")
        entered = entered_tokens(model)
        model(ids, attention_mask=mask, use_cache=False)
        assert (calls[0].total_q, calls[0].segments) == (7, 2)  # in attention: the real tokens
        with remove_padding(model):
            model(ids, attention_mask=mask)
    assert entered == [10, 7]


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
