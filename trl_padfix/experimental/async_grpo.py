"""
Asynchronous GRPO without padding: trees of rollouts on any attention, any layer that is packed, any device.

TRL computes its trees with one FlashAttention-3 kernel. Here packed forwards compute them. Loop, loss, batching,
logging and weight transfer stay TRL's. The part [`TreePolicy`] loads the policy with the configured attention.
[`RolloutRow`] builds TRL's trees faster. [`RolloutQueue`] finds a rollout worker that will never yield a sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch.nn.utils.rnn import pad_sequence

from ..core.layout.tree_arguments import leaf_paths
from ..trainers.attention_choice import AttentionChoice
from ..trainers.base import PARTS, PaddingFreeMixin
from ..trainers.checks import require_columns
from ..trainers.parts import entered
from ..trainers.settings import AttentionConfig, PackingConfig
from ..trainers.task import Task
from ..trainers.temporary_attributes import temporarily_set
from ..versions import require
from . import of_trl


require("trl", "AsyncGRPOTrainer")  # TRL 1.18 has another trainer, with other modules and fields: say so first
with of_trl("async_grpo"):
    import trl.experimental.async_grpo.async_grpo_trainer as trl_async
    from trl.experimental.async_grpo import AsyncGRPOConfig as TRLAsyncGRPOConfig
    from trl.experimental.async_grpo import AsyncGRPOTrainer as TRLAsyncGRPOTrainer

from .rollout_checks import RolloutQueue, check_server, check_tokenizer, stop_without_waiting  # noqa: E402
from .rollout_rows import FixedCountBatcher, TokenBudgetBatcher  # noqa: E402


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import TrainingArguments


__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer"]

logger = get_logger(__name__)


@dataclass
class AsyncGRPOConfig(AttentionConfig, PackingConfig, TRLAsyncGRPOConfig):
    """
    TRL's [`~trl.experimental.async_grpo.AsyncGRPOConfig`] with padding removal.

    With `padding_free` the trees run on the `attn_implementation` of this configuration (transformers' choice by
    default) instead of TRL's FlashAttention-3 kernel. TRL's tree holds some tokens twice; with `prefix_sharing` each
    distinct token is computed once. The token budget of a micro-batch is TRL's `token_budget`.

    Raises:
        ValueError: If `prefix_sharing` is set without `padding_free`, or a field has a value that it cannot have.

    Example:

    ```python
    >>> args = AsyncGRPOConfig("runs/async-grpo", padding_free=True, prefix_sharing=True, use_cpu=True, bf16=False)

    ```
    """


class AsyncGRPOTask(Task):
    """A batch is a tree row: its samples are the paths from the root to the leaves."""

    columns = [{"prompt"}]
    needs = "Completions are generated from `prompt`"

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        if config is not None and str(getattr(config.eval_strategy, "value", config.eval_strategy)) != "no":
            raise ValueError(
                f"`eval_strategy={config.eval_strategy!r}`: TRL's asynchronous GRPO has no evaluation. Leave it out, "
                "and evaluate checkpoints of the run."
            )
        parallelism = getattr(config, "parallelism_config", None)
        if parallelism is not None and max(parallelism.cp_size or 1, parallelism.sp_size or 1) > 1:
            raise ValueError("Asynchronous GRPO makes its rows itself: `cp_size` and `sp_size` must be 1.")
        dataset = init_kwargs.get("train_dataset")
        if dataset is not None and init_kwargs.get("environment_factory") is None:
            require_columns(dataset, "train", self.columns, self.needs)
        budget, longest = getattr(config, "token_budget", None) or 0, getattr(config, "max_completion_length", 0)
        if 0 < budget < longest:
            raise ValueError(
                f"A completion may have `max_completion_length={longest}` tokens, and TRL drops every sample of more "
                f"than `token_budget={budget}` tokens, prompt included. Raise the budget, or lower the length."
            )

    def on_attached(self) -> None:
        worker = getattr(self.trainer, "rollout_worker", None)
        if isinstance(worker, trl_async.AsyncRolloutWorker):
            check_tokenizer(self.trainer.processing_class)

    def padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        names = ("tree_cu_seqlens_q", "tree_kv_index", "tree_cu_seqlens_k")
        if not self.trainer.padding.is_removed or any(name not in inputs for name in names):
            return []
        # TRL's collator pads the rows of all processes to one length, with -1.
        ids = inputs["input_ids"][inputs["attention_mask"].bool()].cpu()
        tree = {name: inputs[name][inputs[name] >= 0].cpu().long() for name in names}
        rows = [ids[path] for path in leaf_paths(tree, len(ids))]
        batch = {"input_ids": rows, "attention_mask": [torch.ones_like(row) for row in rows]}
        device = inputs["input_ids"].device
        return [{name: pad_sequence(values, batch_first=True).to(device) for name, values in batch.items()}]

    def parity_inputs(self, inputs: dict[str, Any], batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {}  # the trees of a vision model hold text only

    def row_lengths(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        lengths = inputs.get("sample_lengths")
        return None if lengths is None else lengths[lengths > 0]


class TreePolicy(AttentionChoice):
    """Loads the policy with the attention of the configuration, where TRL names its own kernel for trees."""

    @contextlib.contextmanager
    def around_init(self, config: TrainingArguments) -> Iterator[None]:
        if not self.settings.padding_free:
            yield  # TRL's kernel, with TRL's errors
            return
        load = trl_async.create_model_from_path
        kwargs = {k: v for k, v in (config.model_init_kwargs or {}).items() if k != "attn_implementation"}

        with contextlib.ExitStack() as stack:

            def create_model_from_path(path: str, *args: Any, **more: Any) -> Any:
                model = load(path, *args, **more | {"attn_implementation": self._chosen.get("")})
                stack.enter_context(_passing_kernel_checks(model))
                return model

            # TRL passes its kernel's name itself: a second one in `model_init_kwargs` would be a `TypeError`.
            stack.enter_context(temporarily_set(config, "model_init_kwargs", kwargs))
            stack.enter_context(temporarily_set(trl_async, "create_model_from_path", create_model_from_path))
            if not torch.cuda.is_available():  # TRL reads the name of the device with a function of CUDA
                stack.enter_context(temporarily_set(trl_async, "get_peak_flops_per_device", lambda *args: None))
            yield

    @contextlib.contextmanager
    def around_dataloader(self, dataset: Dataset | IterableDataset, is_training: bool) -> Iterator[None]:
        trainer = self.trainer
        if not self.settings.padding_free or trainer.rollout_worker is None:  # other processes get rows from the first
            yield
            return
        if isinstance(trainer.rollout_worker, trl_async.AsyncRolloutWorker):
            stop_without_waiting(trainer.rollout_worker)
            check_server(trainer)
        ours = {
            "RolloutQueueDataset": partial(RolloutQueue, trainer),
            "FixedCountBatcher": FixedCountBatcher,
            "TokenBudgetBatcher": TokenBudgetBatcher,
        }
        with entered(temporarily_set(trl_async, name, value) for name, value in ours.items()):
            yield


@contextlib.contextmanager
def _passing_kernel_checks(model: torch.nn.Module) -> Iterator[None]:
    """
    Let a model pass TRL's checks for features that its tree kernel lacks: kinds of layers, and attention sinks.

    Packing has checks of its own. TRL reads `layer_types` of the config, then the names of the parameters, once. After
    that the model is as it was.
    """
    config, named_parameters = model.config.get_text_config(), model.named_parameters
    # Some configs compute `layer_types` in a property without a setter. So the config gets another class meanwhile.
    names = {"layer_types", type(config).attribute_map.get("layer_types", "layer_types")}
    without_layer_types = type(
        type(config).__name__, (type(config),), dict.fromkeys(names, property(lambda config: None))
    )

    def undo() -> None:
        if type(config) is without_layer_types:
            object.__setattr__(config, "__class__", without_layer_types.__base__)
        model.__dict__.pop("named_parameters", None)

    def renamed_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        undo()
        return ((name.replace(".sinks", ".sink_logits"), p) for name, p in named_parameters(*args, **kwargs))

    object.__setattr__(config, "__class__", without_layer_types)
    model.named_parameters = renamed_parameters
    try:
        yield
    finally:
        undo()


class AsyncGRPOTrainer(PaddingFreeMixin, TRLAsyncGRPOTrainer):
    """
    TRL's [`~trl.experimental.async_grpo.AsyncGRPOTrainer`] (TRL 1.16 and 1.17) without padding.

    It has the arguments of TRL's trainer. With `padding_free=True` TRL's trees of rollouts run on any attention
    implementation and device, also through gated delta nets, Mamba 2, short convolutions, sliding windows and sinks,
    which TRL's trainer refuses. With `prefix_sharing=True` the copies of tokens in TRL's trees are computed once.
    Rollouts, rewards, loss, batching and weight transfer are TRL's.

    Logs `perf/tokens_per_second` (tokens of the samples), `padfix/pad_fraction` and `padfix/shared_fraction`, which is
    the fraction of the samples' tokens that is not computed. TRL has no evaluation here.

    Args:
        *args, **kwargs:
            As TRL's trainer. `args` may be this package's [`AsyncGRPOConfig`] or TRL's.

    Raises:
        PaddingRemovalError: If the model cannot be packed with exact results.
        ParityError: On the first batch, if the packed and the padded forward differ.
        ValueError: For a server of another model, a tokenizer whose answers cannot be parsed, and a token budget that
            no sample fits in.

    Example:

    ```python
    from trl_padfix.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    args = AsyncGRPOConfig("runs/async-grpo", padding_free=True, prefix_sharing=True)
    trainer = AsyncGRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=shorter, args=args, train_dataset=prompts)
    trainer.train()  # `vllm serve Qwen/Qwen3-0.6B` runs beside it
    ```
    """

    task_class = AsyncGRPOTask
    part_classes = tuple(TreePolicy if part is AttentionChoice else part for part in PARTS)

    _can_count_flops = True  # `False` after the warning that TRL cannot

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "TRL's asynchronous GRPO has no evaluation: rollouts come from its worker only. Evaluate checkpoints."
        )

    def _log_step_metrics(self) -> None:
        if not self.padding.settings.padding_free:
            super()._log_step_metrics()
            return
        count = trl_async.compute_flops_per_token

        def count_or_skip(config: TrainingArguments, seq_len: int) -> float:
            try:
                return count(config, seq_len)
            except (AttributeError, TypeError, ZeroDivisionError) as error:
                # TRL raises this for configs with other field names. A missing metric is no reason to end a run.
                if self._can_count_flops:
                    self._can_count_flops = False
                    logger.warning(f"TRL cannot count the operations of this model ({error}): no MFU is logged.")
                return float("nan")

        with temporarily_set(trl_async, "compute_flops_per_token", count_or_skip):
            super()._log_step_metrics()
