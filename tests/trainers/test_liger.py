"""
Liger's layers, by a stand-in in plain torch: TRL's trajectories with padding removed.

From 1.10 on TRL asks Liger for no losses.
"""

from collections import Counter

import pytest
import torch
import torch._dynamo
import trl
from kit.cells import slow_but
from kit.liger_stand_in import liger_stand_in
from kit.methods import build_examples, build_pairs
from kit.online_runs import ONLINE_SETTINGS, build_prompts, load_policy, reward_words, save_policy
from kit.sft_runs import build_rows
from kit.trainer_runs import MODES, SETTINGS, assert_same, break_mode, build_model, build_tokenizer, run
from packaging.version import Version

import trl_padfix


pytestmark = pytest.mark.skipif(Version(trl.__version__) < Version("1.10"), reason="TRL also asks for Liger's losses")


def train(kind: str, package, tmp_path, liger: bool = True, **config):
    """Three steps, and the tokens that Liger's kernels saw in them."""
    settings = {"per_device_train_batch_size": 4, "max_steps": 3, "output_dir": str(tmp_path / "run")}
    if kind == "GRPO":
        settings = ONLINE_SETTINGS | settings | {"per_device_train_batch_size": 8}
        given = {"model": load_policy(save_policy(tmp_path / "policy")), "reward_funcs": reward_words}
        given["train_dataset"] = build_prompts(24)
    else:
        data = {"DPO": build_pairs, "SFT": build_rows, "KTO": build_examples}[kind](12)
        given = {"model": build_model(), "train_dataset": data}
        if kind == "SFT":
            settings["eos_token"] = "<eos>"
        else:
            given["ref_model"] = build_model(seed=1)
    torch.manual_seed(0)
    with liger_stand_in() as tokens:
        arguments = getattr(package, f"{kind}Config")(**SETTINGS | settings | config, use_liger_kernel=liger)
        trainer_class = getattr(package, f"{kind}Trainer")
        trainer = trainer_class(args=arguments, processing_class=build_tokenizer(), **given)
        finished = run(trainer, lambda *_: None)
        return finished.trajectory(), Counter(tokens)


KINDS = ["DPO", "SFT", "KTO", "GRPO"]


@pytest.mark.parametrize("kind", slow_but(KINDS[:2], KINDS))
def test_ligers_layers_give_trls_trajectory_on_fewer_tokens(kind, tmp_path):
    theirs, padded = train(kind, trl, tmp_path)
    ours, packed = train(kind, trl_padfix, tmp_path, parity_check=False, **MODES["padding-free"])
    assert_same(ours, theirs)
    ours, shared = train(kind, trl_padfix, tmp_path, parity_check=False, **MODES["prefix sharing"])
    assert_same(ours, theirs)
    for kernel in ("rms_norm", "swiglu", "rope"):
        assert 0 < shared[kernel] < packed[kernel] < padded[kernel]
    plain, none = train(kind, trl, tmp_path, liger=False)
    assert_same(ours, plain)
    assert none == {}


@pytest.mark.parametrize("kind", slow_but(["DPO"], ["DPO", "SFT"]))
def test_a_leaking_layout_bends_the_curve(kind, tmp_path, monkeypatch):
    theirs, _ = train(kind, trl, tmp_path)
    ours, _ = train(kind, trl_padfix, tmp_path, parity_check=False, **break_mode(monkeypatch, "prefix sharing"))
    assert not torch.allclose(ours, theirs, rtol=1e-3)


@pytest.mark.slow
def test_compiled_layers_have_ligers_kernels_in_them(tmp_path):
    theirs, _ = train("DPO", trl, tmp_path)
    torch._dynamo.reset()
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    ours, _ = train("DPO", trl_padfix, tmp_path, parity_check=False, **MODES["prefix sharing"], **compiled)
    torch._dynamo.reset()
    assert_same(ours, theirs, atol=1e-5)
