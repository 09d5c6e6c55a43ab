"""Every set-up of SFT, each a configuration and what else its trainer is given."""

import torch
import trl
from kit.rows import build_long_rows, build_rows
from kit.trainer_runs import lora
from peft import TaskType


STEPS = 20
NEWEST = hasattr(trl.trainer.utils, "add_fused_lm_head")
"""Whether TRL counts entropy over trained tokens, and transformers labels that are predicted."""


def rows_of(kind: str):
    return lambda: {"train_dataset": build_rows(kind=kind), "eval_dataset": build_rows(8, 1, kind)}


def half_the_loss(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / (2 * count)


SET_UPS = {
    "texts": ({}, rows_of("texts")),
    "accumulation": ({"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}, dict),
    "checkpointing": ({"gradient_checkpointing": True}, dict),
    "short rows, padded to multiples of 8": ({"max_length": 12, "pad_to_multiple_of": 8}, dict),
    "keep_end": ({"max_length": 12, "truncation_mode": "keep_end"}, rows_of("texts")),
    "label smoothing": ({"label_smoothing_factor": 0.1, "loss_type": "nll"}, dict),
    "a loss of one's own": ({"loss_type": "nll"}, lambda: {"compute_loss_func": half_the_loss}),
    "lora, checkpointing": (
        {"gradient_checkpointing": True},
        lambda: {"peft_config": lora(task_type=TaskType.CAUSAL_LM)},
    ),
    "a stream": (
        {},
        lambda: {
            "train_dataset": build_rows().to_iterable_dataset(),
            "eval_dataset": build_rows(8, 1).to_iterable_dataset(),
        },
    ),
    "wrapped": ({"packing": True, "packing_strategy": "wrapped", "max_length": 24}, dict),
}
CASES = {"completions only": ({"max_steps": STEPS}, dict), "short": ({}, dict)}
SPLIT = {
    "a long row in five": (
        {"max_length": None, "per_device_train_batch_size": 5},
        lambda: {"train_dataset": build_long_rows(40), "eval_dataset": build_long_rows(10, 1)},
    ),
}
"""For processes that compute a row together."""
CASES |= SET_UPS | SPLIT


def packing() -> dict:
    return {"packing": True, "packing_strategy": "bfd", "max_length": 48, "per_device_train_batch_size": 2}


def evaluated(trainer) -> dict[str, float]:
    """The logs of an evaluation; older TRL does not return all of them."""
    trainer.evaluate()
    return trainer.state.log_history[-1]
