"""What DPO has of its own: compiled layers, metrics, precision. `test_every_method.py` has its trajectories."""

import contextlib
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from kit.trainer_runs import MODES

from trl_padfix import PaddingRemovalError
from trl_padfix.trainers.parts.packing import RemovePadding


@pytest.mark.parametrize("mode", ["padded", "padding-free"])
def test_accelerate_compiles_no_model_whose_layers_are_compiled(mode, make):
    """It keeps what the first trainer of a process asks for, which here is this one."""
    AcceleratorState._reset_state(reset_partial_state=False)
    try:
        trainer = make(config=MODES[mode] | {"torch_compile": True, "torch_compile_backend": "aot_eager"})
        assert (trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO) is (mode == "padding-free")
        assert trainer.args.torch_compile_backend == "aot_eager"
    finally:
        AcceleratorState._reset_state(reset_partial_state=False)


def test_compiled_layers_under_zero_3_are_refused_before_the_first_step(make, monkeypatch):
    trainer = make(config=MODES["padding-free"])
    for stage, refused in ((2, False), (3, True)):
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "accelerator", SimpleNamespace(state=state))
            patch.setattr(trainer.args, "torch_compile", True)
            patch.setattr("trl_padfix.core.attention.compiled.compile_layers", lambda *args, **kwargs: {})
            with pytest.raises(PaddingRemovalError, match="ZeRO-3") if refused else contextlib.nullcontext():
                trainer.padding.part(RemovePadding).on_init_end()
