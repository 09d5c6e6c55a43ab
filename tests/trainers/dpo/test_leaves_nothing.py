"""Models are as before once they are detached, whatever ended the training; TRL's hooks are as we assume."""

import inspect

import pytest
import torch
import trl
from kit.dpo_runs import MODES, TWO_MODES, assert_mode_ran, is_bare, run
from kit.models import build
from kit.trainer_runs import assert_same
from transformers import TrainerCallback
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_padfix import DPOTrainer
from trl_padfix.core.model.views import PACKED_ATTENTION


OVERRIDDEN = {
    "__init__": "self, model, ref_model, args, data_collator, train_dataset, eval_dataset, processing_class, "
    "compute_metrics, callbacks, optimizers, quantization_config, peft_config",
    "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
    "evaluate": "self, eval_dataset, ignore_keys, metric_key_prefix",
    "evaluation_loop": "self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix",
    "get_eval_dataloader": "self, eval_dataset",
    "get_test_dataloader": "self, test_dataset",
    "create_model_card": "self, model_name, dataset_name, tags",
    "log": "self, logs, start_time",
    "_prepare_dataset": "self, dataset, processing_class, args, dataset_name",
    "_precompute_ref_logps": "self, dataset, name, batch_size",
    "training_step": "self, args, kwargs",
    "prediction_step": "self, model, inputs, prediction_loss_only, ignore_keys",
    "get_train_dataloader": "self",
    "floating_point_ops": "self, inputs",
    "_get_train_sampler": "self, train_dataset",
    "_get_num_items_in_batch": "self, batch_samples, device",
    "_track_num_input_tokens": "self, inputs",
    "_get_grad_norm": "self, model, grad_norm",
    "train": "self, resume_from_checkpoint, trial, ignore_keys_for_eval",
    "_push_from_checkpoint": "self, checkpoint_folder",
    "_save_checkpoint": "self, model, trial",
    "_get_output_dir": "self, trial",
}


def test_what_we_override_of_trl_has_the_signatures_that_we_assume():
    ours = [c for c in DPOTrainer.__mro__ if c.__module__.startswith("trl_padfix")]
    functions = {name for c in ours for name, value in vars(c).items() if inspect.isfunction(value)}
    overridden = {name for name in functions if hasattr(trl.DPOTrainer, name)}
    assert overridden == OVERRIDDEN.keys()
    for name, parameters in OVERRIDDEN.items():
        assert ", ".join(inspect.signature(getattr(trl.DPOTrainer, name)).parameters) == parameters, name


def assert_intact(trainer: DPOTrainer) -> None:
    """Models that were trained attached compute as any other once they are detached."""
    trainer.restore_padding()
    # The names that stay registered in transformers, one more after a run with compiled layers; no model keeps one.
    assert {name for name in ALL_ATTENTION_FUNCTIONS if "padfix" in name} <= {
        PACKED_ATTENTION,
        f"{PACKED_ATTENTION}_compiled",
    }
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for model in (trainer.model, trainer.ref_model):
        assert is_bare(model)
        assert model.config._attn_implementation == "sdpa"
        fresh = build("qwen2")
        fresh.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(model.eval()(**inputs).logits, fresh(**inputs).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", TWO_MODES)
def test_an_exception_in_a_forward_leaves_models_that_can_be_detached(mode, checkpointing, make):
    trainer = make(config=MODES[mode] | {"gradient_checkpointing": checkpointing})
    calls = []

    def fail(module, args, output):
        calls.append(module)
        if len(calls) == 6:
            raise RuntimeError("out of memory, say")

    hook = trainer.model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        trainer.train()
    hook.remove()
    assert_intact(trainer)


def test_an_interruption_between_steps_leaves_models_that_can_be_detached(make):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = make(config=MODES["prefix sharing, left"], callbacks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert_intact(trainer)


def test_a_trainer_whose_models_are_detached_trains_padded(make, trl_run):
    trainer = make(config=MODES["padding-free, left"])
    trainer.restore_padding()
    ours = run(trainer)
    assert_same(ours.trajectory, trl_run("sigmoid").trajectory)
    assert_mode_ran(ours, "padded, left")


@pytest.mark.parametrize("mode", TWO_MODES)
def test_an_error_while_the_trainer_is_made_leaves_the_models_as_they_were(mode, make):
    class Fails(DPOTrainer):
        def compute_ref_log_probs(self, model, inputs):
            raise RuntimeError("out of memory, say")

    policy, reference = build("qwen2"), build("qwen2", seed=1)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        make(Fails, MODES[mode] | {"precompute_ref_log_probs": True}, model=policy, ref_model=reference)
    assert is_bare(policy)
    assert is_bare(reference)


@pytest.mark.parametrize("first", ["padding-free, left", "padded, left"])
def test_a_padded_trainer_after_another_one_is_padded(first, make):
    before = make(config=MODES[first] | {"max_steps": 1})
    before.train()
    seen = [handle.stats.packed_tokens for handle in before.padding.handles]
    models = {"model": before.model, "ref_model": before.ref_model}
    after = make(config={"max_steps": 1, "padding_side": "right"}, **models)
    after.train()
    assert [handle.stats.packed_tokens for handle in before.padding.handles] == seen
    assert not any("forward" in vars(part) for part in attended(models))


def attended(models: dict[str, torch.nn.Module]) -> list[torch.nn.Module]:
    """The decoders and their attention modules, which TRL itself leaves as they are."""
    return [part for model in models.values() for part in (model.model, model.model.layers[0].self_attn)]
