"""
TRL's defaults (`bf16=True`, gradient checkpointing): each trainer in each mode, full models and adapters.

Rounding hides much in half precision, so tokens are counted: those that enter each layer and the head, and the calls
of each patch, which must be as many as in float32.
"""

import gc
from collections import Counter
from functools import cache
from unittest.mock import patch

import pytest
import torch
import trl
from kit.budget_runs import BUDGETS, build_branching
from kit.methods import make_trainer
from kit.observe import accept_hooks, has_cache
from kit.trainer_runs import lora, to_the_bit
from torch import nn
from transformers import TrainerCallback

import trl_padfix
from trl_padfix.core.call.calls import PackedCall
from trl_padfix.core.call.prefix_states import ForwardStates, PrefixStates
from trl_padfix.core.layout.layout import Layout
from trl_padfix.core.model.patching import ForwardPatch
from trl_padfix.trainers.batching.part_runner import PartRunner


KINDS = ["SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO", "Distillation"]
OFFLINE = KINDS[:4]
MODES = {
    "import alone": {},
    "padding-free": {"padding_free": True},
    "sharing": {"padding_free": True, "prefix_sharing": True},
    "budget": {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": ...},
}
CELLS = [(k, m, (i + j) % 2 > 0) for i, k in enumerate(KINDS) for j, m in enumerate(MODES)]
STEPS = 2


class Kept(TrainerCallback):
    """What a step has left behind: objects of its forwards that are alive before the optimizer's step."""

    kinds = (PartRunner, PackedCall, PrefixStates, ForwardStates, Layout)

    def __init__(self):
        self.found, self.of_other_tests = [], self.alive()

    def alive(self):
        gc.collect()
        return {id(x): x for x in gc.get_objects() if isinstance(x, self.kinds)}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        alive = self.alive()
        self.found += [type(alive[i]).__name__ for i in alive.keys() - self.of_other_tests.keys()]


class Counts:
    """The tokens that enter each layer and the head of the policy, forward by forward, and the calls of each patch."""

    def __init__(self, trainer):
        self.layers, self.head, self.patches = {}, [], Counter()
        for name, module in trainer.model.named_modules():
            if isinstance(module, nn.ModuleList) and name.endswith("layers"):
                for i, layer in enumerate(module):
                    self.layers[i] = []
                    layer.register_forward_pre_hook(self.counting(self.layers[i]), with_kwargs=True)
            if name.endswith(("lm_head", "score")):
                module.register_forward_pre_hook(self.counting(self.head), with_kwargs=True)
        accept_hooks(trainer.model)

    def counting(self, tokens):
        def count(module, args, kwargs):
            if not has_cache(kwargs) and args[0].dim() > 2:
                tokens.append(args[0].shape[:-1].numel())

        return count

    def __eq__(self, other):
        return vars(self) == vars(other)


def train(library, kind, folder, adapters, **fields):
    """A training on rows that share prefixes: its logs, counts, and what its steps keep."""
    data = {"train_dataset": build_branching(kind)} if kind in OFFLINE else {}
    fields = {k: BUDGETS[kind] if v is ... else v for k, v in fields.items()}
    precision = {"bf16": True, "gradient_checkpointing": True} | fields
    given = {"max_steps": STEPS, "per_device_train_batch_size": 8, "eval_dataset": None} | data | precision
    given |= {"peft_config": lora()} if adapters else {}
    given |= {"parity_check": False} if library is trl_padfix and "padding_free" in fields else {}
    torch.manual_seed(0)
    trainer = make_trainer(library, kind, folder, **given)
    counts, kept, own = Counts(trainer), Kept(), ForwardPatch.__call__

    def counted(self, *args, **kwargs):
        counts.patches[type(self).__name__] += 1
        return own(self, *args, **kwargs)

    trainer.add_callback(kept)
    with patch.object(ForwardPatch, "__call__", counted):
        trainer.train()
    return trainer, [log for log in trainer.state.log_history if "loss" in log], counts, kept.found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    return cache(lambda kind, adapters, **fields: train(trl, kind, folder, adapters, **fields)[1])


@pytest.mark.parametrize(("kind", "mode", "adapters"), CELLS)
def test_each_mode_has_trls_figures_and_computes_what_it_does_in_float32(kind, mode, adapters, theirs, tmp_path):
    fields = MODES[mode]
    trainer, logs, counts, kept = train(trl_padfix, kind, tmp_path, adapters, **fields)
    assert not kept
    if mode == "import alone":
        assert to_the_bit(logs) == to_the_bit(theirs(kind, adapters))
        assert not counts.patches
        return
    largest = max(tokens for layer in counts.layers.values() for tokens in layer)
    assert set(map(tuple, counts.layers.values())) == {tuple(counts.layers[0])} or trainer.args.gradient_checkpointing
    assert mode != "budget" or largest <= BUDGETS[kind]
    assert trainer.padding.stats.padded_forwards == 0
    assert trainer.padding.stats.packed_tokens < trainer.padding.stats.padded_tokens
    if kind not in OFFLINE:  # in half precision other completions are drawn
        return
    exact = {"bf16": False, "gradient_checkpointing": False}
    again = train(trl_padfix, kind, tmp_path, adapters, **fields, bf16=False)[2]
    assert counts == again
    assert all(counts.patches[name] for name in ("DecoderPatch", "ViewPatch"))
    right, half = theirs(kind, adapters, **exact)[0], theirs(kind, adapters)[0]
    for name in ("loss", "grad_norm"):
        allowed = 2 * abs(half[name] - right[name]) + torch.finfo(torch.bfloat16).eps * abs(right[name])
        assert abs(logs[0][name] - right[name]) <= allowed, name
