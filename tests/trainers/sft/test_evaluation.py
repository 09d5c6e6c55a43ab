"""
Evaluations: TRL's metrics, whatever the batch size.

Those that are compared with TRL's are one batch: TRL's metrics are means over batches, ours over tokens.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
from kit.cells import slow_but
from kit.sft_cases import EXACT, LABELS_IN_DATA, NEWEST, SHORT, TWO_MODES, dpo_pairs, evaluated, make_dpo
from kit.sft_runs import build_rows
from kit.trainer_runs import MODES, SIDED_MODES, run, watch_inputs
from torch.utils._python_dispatch import TorchDispatchMode

from trl_padfix import SFTTrainer


def batch_sizes(make_sized, names, sizes=(1, 2, 8, 64)) -> list[dict[str, float]]:
    metrics = [evaluated(make_sized(size)) for size in sizes]
    return [{name: m[f"eval_{name}"] for name in names} for m in metrics]


@pytest.mark.parametrize("mode", slow_but(["padded, left", TWO_MODES[1]], ["padded, left", *TWO_MODES]))
def test_any_evaluation_batch_size_gives_the_same_metrics(mode, make):
    names = ["loss", "mean_token_accuracy", *(["entropy"] if NEWEST else [])]
    rows = build_rows(21, 3)
    got = batch_sizes(
        lambda n: make(config=SIDED_MODES[mode] | EXACT | {"per_device_eval_batch_size": n}, eval_dataset=rows), names
    )
    for metrics in got[1:]:
        assert metrics == pytest.approx(got[0], abs=1e-5)
    several, one = batch_sizes(
        lambda n: make(trl.SFTTrainer, {"per_device_eval_batch_size": n}, eval_dataset=rows), names, sizes=(8, 64)
    )
    assert one == pytest.approx(got[0], abs=1e-5)
    assert several != pytest.approx(got[0], abs=1e-5)


@pytest.mark.parametrize("mode", ["padded", "prefix sharing"])
def test_any_evaluation_batch_size_gives_the_same_metrics_in_dpo(mode, tmp_path):
    names = ["loss", "rewards/margins", "rewards/chosen", "rewards/accuracies", "logps/rejected"]
    names += ["entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy"] if NEWEST else []
    given = {"train_dataset": dpo_pairs(4), "eval_dataset": dpo_pairs(21, 3)}
    exact = MODES[mode] | EXACT
    got = batch_sizes(lambda n: make_dpo(tmp_path, exact | {"per_device_eval_batch_size": n}, **given), names)
    for metrics in got[1:]:
        assert metrics == pytest.approx(got[0], abs=1e-5)
    theirs = evaluated(make_dpo(tmp_path, {"per_device_eval_batch_size": 64}, trl.DPOTrainer, **given))
    assert got[0] == pytest.approx({name: theirs[f"eval_{name}"] for name in names}, abs=1e-5)


class LogitsSized(TorchDispatchMode):
    """Whether something of `(B, L, V)` was made."""

    seen = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[-1] == 40:
            self.seen = True
        return out


@pytest.mark.skipif(not NEWEST, reason="TRL computes its loss from logits")
def test_an_evaluation_of_the_loss_makes_no_logits(make):
    trainer = make(config=MODES["padding-free"] | {"parity_check": False})
    with LogitsSized() as logits:
        trainer.evaluate()
    assert not logits.seen
    with LogitsSized() as logits, torch.no_grad():
        trainer.model(torch.tensor([[1, 2]]))
    assert logits.seen


@pytest.mark.parametrize("mode", TWO_MODES)
def test_compute_metrics_sees_trls_logits_of_the_real_tokens(mode, make):
    def compute_metrics(prediction):
        logits, labels = (torch.as_tensor(values) for values in (prediction.predictions, prediction.label_ids))
        real = labels != -100
        return {"sum": logits[real].double().abs().sum().item(), "tokens": int(real.sum())}

    theirs, ours = (
        make(trainer_class, config | {"loss_type": "nll"}, compute_metrics=compute_metrics).evaluate()
        for trainer_class, config in ((trl.SFTTrainer, {}), (SFTTrainer, SIDED_MODES[mode]))
    )
    assert ours["eval_tokens"] == theirs["eval_tokens"]
    assert ours["eval_sum"] == pytest.approx(theirs["eval_sum"], rel=1e-5)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_dictionaries_of_evaluation_sets_are_evaluated_each(mode, make):
    sets = {"fresh": build_rows(7, 2), "other": build_rows(5, 3)}
    theirs = make(trl.SFTTrainer, eval_dataset=sets).evaluate()
    trainer = make(config=SIDED_MODES[mode], eval_dataset=sets)
    ours = trainer.evaluate()
    for name in ("eval_fresh_loss", "eval_other_loss"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
    if LABELS_IN_DATA:  # before, TRL took prepared data only
        assert trainer.evaluate(build_rows(7, 2))["eval_loss"] == pytest.approx(ours["eval_fresh_loss"], rel=1e-5)


@pytest.mark.skipif(not NEWEST, reason="older transformers have another name for the strategy")
def test_the_longest_batch_is_first_where_transformers_sorts_by_length(make):
    config = SHORT | {"train_sampling_strategy": "group_by_length", "auto_find_batch_size": True, "padding_free": True}
    ours = run(make(config=config), watch_inputs(""))
    lengths = [mask.sum(1).max().item() for _, mask in ours.batches]
    assert lengths[0] == max(lengths)


@pytest.mark.slow
@pytest.mark.parametrize("packs", slow_but([True], [False, True]))
def test_two_processes_normalise_as_trl_does_and_evaluate_as_one(packs, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(f"""
import json
import os
import sys
import torch
import trl
import trl_padfix
from kit.sft_runs import METRICS, TEMPLATE, build_rows
from kit.trainer_runs import SETTINGS, build_model, build_tokenizer
torch.set_num_threads(1)
config = dict(max_length=48, packing=True) if {packs} else dict(max_length=26)
for library, more in ((trl, {{}}), (trl_padfix, dict(padding_free=True, exact_eval_means=True))):
    args = SETTINGS | config | more | dict(
        output_dir={str(tmp_path)!r}, max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        per_device_eval_batch_size=2,
    )
    trainer = library.SFTTrainer(
        build_model(), args=library.SFTConfig(**args), train_dataset=build_rows(), eval_dataset=build_rows(8, 1),
        processing_class=build_tokenizer(chat_template=TEMPLATE),
    )
    trainer.train()
    trainer.evaluate()
    assert trainer.accelerator.num_processes == 2
    logs = trainer.state.log_history
    losses = [log["loss"] for log in logs if "loss" in log]
    evaluated = {{name: logs[-1]["eval_" + name] for name in ("loss", "mean_token_accuracy")}}
    if trainer.is_world_process_zero():
        print("figures", json.dumps([losses, evaluated]))
    if library is trl_padfix:
        stats = trainer.padding.stats
        assert 0 < stats.packed_tokens
        assert (stats.packed_tokens == stats.padded_tokens) is {packs}
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)  # threads of gloo outlive the group, and may abort an interpreter that ends under them
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = (json.loads(line.removeprefix("figures")) for line in done.stdout.splitlines() if "figures" in line)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert ours[1] != pytest.approx(theirs[1], abs=1e-5)  # a mean over batches
