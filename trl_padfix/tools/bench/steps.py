"""A training step of a TRL trainer on prepared batches: its time, memory and arithmetic."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import trl.trainer.dpo_trainer as trl_dpo
import trl.trainer.sft_trainer as trl_sft
from transformers import Trainer

from ...core.call.runner_patch import attach_runner_patch
from ...core.context import within
from ...core.layout.layout import Layout
from ...core.model.find import find_decoder, find_pretrained
from ...core.remove import attachment_of, number_padded_rows, remove_padding
from ...trainers.batching.budget_collator import BudgetCollator
from ...trainers.batching.micro_batches import CollatedStep, step_of
from ...trainers.batching.prefix_schedule import MicroBatchRunner, ids_and_masks, sharing_obstacle
from ...trainers.batching.step_plan import Share, StepPlan
from ...trainers.data.collators import DataCollatorForLanguageModeling, DataCollatorForPreference
from ...trainers.temporary_attributes import temporarily_set
from .peak import wait
from .settings import VARIANTS, BenchSettings, Variant


__all__ = ["BenchStep", "attached", "decoder_inputs", "profiled", "saved_storages", "step_flops"]


COLLATORS = {
    trl_dpo.DataCollatorForPreference: DataCollatorForPreference,
    trl_sft.DataCollatorForLanguageModeling: DataCollatorForLanguageModeling,
}
"""Collators of this package by those of TRL that they extend: they take a `padding_side`."""

TRL = VARIANTS["trl"]


class BenchStep:
    """
    A training step of a TRL trainer, to be run on batches of prepared rows.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer of TRL, with its models.
        rows (`list[dict]`):
            Rows as the trainer has prepared them; for GRPO each is a batch.
        settings ([`BenchSettings`]):
            Settings that the trainer was built with.
        rendered (`str`, *optional*):
            Chat template that conversations were rendered with, in words; `None` for other data.
    """

    def __init__(
        self, trainer: Trainer, rows: list[dict[str, Any]], settings: BenchSettings, rendered: str | None = None
    ):
        self.trainer, self.rows, self.settings = trainer, rows, settings
        self.rendered = rendered
        self.compiled: dict[Any, Callable] = {}  # compiled layers, reused by all steps
        if settings.liger:
            from transformers.integrations.liger import apply_liger_kernel

            # `Trainer.train` is not called here, so this and the lines below prepare the models as it does.
            apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
        if settings.gradient_checkpointing:
            trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        if settings.dtype == "autocast":  # TRL has prepared the reference already
            trainer.model = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        weights = [p for p in trainer.model.parameters() if p.requires_grad]
        # No step changes the weights, so all variants have equal ones; the arithmetic is that of any learning rate.
        trainer.optimizer = torch.optim.AdamW(weights, lr=0.0, weight_decay=0.0)

    @property
    def models(self) -> list[torch.nn.Module]:
        return [m for m in (self.trainer.model, getattr(self.trainer, "ref_model", None)) if m is not None]

    def collate(self, rows: list[int], variant: Variant = TRL) -> dict[str, torch.Tensor]:
        """
        The batch of some rows on the CPU, as a data loader worker makes it for a variant: always of new tensors,
        because a layout that an earlier step cached for the same ones would cost nothing.
        """
        collator = self.trainer.data_collator
        if variant.flat:
            collator = replace(collator, padding_free=True)
        elif variant.pads_left and (ours := COLLATORS.get(type(collator))) is not None:
            collator = ours(**vars(collator), padding_side="left")
        return collator([self.rows[i] for i in rows])

    def to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Move a batch to the device of the trainer. Online trainers of TRL override the method with generation."""
        return Trainer._prepare_inputs(self.trainer, batch)  # type: ignore[return-value]

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        """
        Number of items that the loss averages over: pairs, for SFT labelled tokens, for GRPO completions. Losses of
        batches that divide the same rows differently are compared by their means with these weights.
        """
        if "labels" in batch:
            return int((batch["labels"][:, 1:] != -100).sum())
        # DPO batches hold 2 rows per pair: all chosen ones, then all rejected ones.
        return len(next(iter(batch.values()))) // (2 if "input_ids" in batch else 1)

    def run(self, rows: list[int], variant: Variant) -> dict[str, float]:
        """Run a step and return its seconds, loss, gradient norm and projection, and on CUDA its peak memory."""
        cuda = self.settings.device == "cuda"
        host = self.collate(rows, variant)
        batch = self.to_device(host)
        wait(self.settings.device)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        if variant.has_budget:
            loss = self._train_in_micro_batches(rows)
        else:
            loss = self.forward_and_backward(batch, host, variant)
        if self.settings.optimizer:
            self.trainer.optimizer.step()
        wait(self.settings.device)
        figures = {"seconds": time.perf_counter() - start, "loss": loss.item()}
        if cuda:
            figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        figures["grad_norm"] = torch.stack(torch._foreach_norm(gradients)).norm().item()
        figures["grad_projection"] = sum(_projected(g) for g in gradients)
        self.trainer.optimizer.zero_grad()
        return figures

    def forward_and_backward(
        self, batch: dict[str, Any], host: dict[str, Any], variant: Variant, *, backward: bool = True
    ) -> torch.Tensor:
        """
        Run a step on one batch, or its forward only.
        """
        if backward:
            return self.trainer.training_step(self.trainer.model, batch, None)
        with self.trainer.compute_loss_context_manager():
            loss = self.trainer.compute_loss(self.trainer.model, batch)
        assert isinstance(loss, torch.Tensor)  # no outputs were asked for
        return loss

    def micro_batches(self, rows: list[int]) -> CollatedStep:
        """The micro-batches of a step under the token budget, as a training collates them, on the device."""
        settings, examples = self.settings, [self.rows[i] for i in rows]
        measure = settings.measure(settings.max_length, sharing=True)
        budget = settings.max_tokens_per_batch or math.ceil(measure.costs(examples).tokens.sum() / 2)
        shares = all(
            handle is not None and not sharing_obstacle(handle, self.trainer.args, is_sharded=False)
            for handle in map(attachment_of, self.models)
        )
        collate = BudgetCollator(
            self.trainer.data_collator,
            measure,
            budget,
            StepPlan(rows=len(rows), micro_batch=len(rows)),
            weight_by_tokens=settings.trainer == "sft",
            share_across_micro_batches=shares,
            plan_in_worker=shares,
            rows_per_item=2 if settings.trainer == "dpo" else 1,
        )
        share = Share(len(rows), rows, trl_index=[0] * len(rows))
        step = step_of(collate([(share, examples)]).to(self.settings.device))
        assert step is not None  # the batch is unmodified
        return step

    def _train_in_micro_batches(self, rows: list[int]) -> torch.Tensor:
        """Run a step as `max_tokens_per_batch` trains it: a prefix of several micro-batches is computed once."""
        step = self.micro_batches(rows)
        batches = [micro_batch.batch for micro_batch in step.micro_batches]
        runner = MicroBatchRunner(len(batches), step.prefix_plan, ids_and_masks(batches))
        loss = torch.zeros((), device=self.settings.device)
        for i, (batch, weight, _) in enumerate(step.micro_batches):
            runner.start(i)
            weighted = partial(_weighted_loss, self.trainer.compute_loss, weight)
            with within(runner=runner), temporarily_set(self.trainer, "compute_loss", weighted):
                loss = loss + self.trainer.training_step(self.trainer.model, batch, None)
        runner.check()
        return loss

    def kept_mib(self, rows: list[int], variant: Variant) -> float | None:
        """
        MiB that the graph of a step saves for its backward; weights and the batch are left out. `None` for a step of
        several backwards.
        """
        if variant.has_budget:
            return None
        host = self.collate(rows, variant)
        batch, weights = self.to_device(host), [p for model in self.models for p in model.parameters()]
        with saved_storages([*batch.values(), *weights]) as saved:
            self.forward_and_backward(batch, host, variant, backward=False)
        return sum(storage.nbytes() for storage in saved.values()) / 2**20

    def peak_gib(self, rows: list[int], variant: Variant) -> float:
        """Peak memory of a step on CPU, in GiB: models, optimizer state, and the largest sum of live allocations."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with profiled(activities=activities, profile_memory=True) as profile:
            self.run(rows, variant)
        live = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":  # positive: an allocation; negative: a release
                live += event.nbytes()
                peak = max(peak, live)
        state = [v for s in self.trainer.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        permanent = [*state, *(p for model in self.models for p in model.parameters())]
        return (peak + sum(t.numel() * t.element_size() for t in permanent)) / 2**30

    def profile(self, rows: list[int], variant: Variant) -> str:
        """The dozen longest operations of a step, as the profiler prints them."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.settings.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with profiled(activities=activities) as profile:
            self.run(rows, variant)
        key = "self_cuda_time_total" if self.settings.device == "cuda" else "self_cpu_time_total"
        return profile.key_averages().table(sort_by=key, row_limit=12, max_name_column_width=50)


def _weighted_loss(compute: Callable[..., Any], weight: float, *args: Any, **kwargs: Any) -> torch.Tensor:
    return weight * compute(*args, **kwargs)


def profiled(**options: Any) -> torch.profiler.profile:
    """Torch's profiler without its log."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # must be set before the first profile of the process
    return torch.profiler.profile(**options)


@contextlib.contextmanager
def saved_storages(exclude: Iterable[torch.Tensor]) -> Iterator[dict[int, torch.UntypedStorage]]:
    """
    Collect the storages that autograd saves for backward within the block, each once, without those of `exclude`.

    Yields:
        `dict`: Storages by address; complete at the end of the block.
    """
    excluded = {tensor.untyped_storage().data_ptr() for tensor in exclude}
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            # The storage itself, not its size: while it lives, no other storage gets its address.
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        yield saved


def _projected(gradient: torch.Tensor) -> float:
    """
    Dot product of a gradient with a fixed vector.

    It is linear in the gradient. If two variants divide the same rows into different batches, the sums of their
    projections must agree, and no gradient has to be stored.
    """
    flat = gradient.flatten()
    # Cosines of 0, 1, 2, ...: no two entries have the same weight, and no random state is needed.
    return torch.dot(flat.float(), torch.arange(len(flat), device=flat.device).float().cos()).item()


@contextlib.contextmanager
def attached(step: BenchStep, variant: Variant) -> Iterator[None]:
    """Attach a variant to the models of a step, and detach it at the end of the block."""
    with contextlib.ExitStack() as stack:
        for model in step.models:
            if variant.packed:
                handle = stack.enter_context(remove_padding(model, prefix_sharing=variant.shares))
                if variant.has_budget:
                    stack.callback(attach_runner_patch(model).remove)
                if variant.compiled:
                    from ...core.attention.compiled import compile_layers

                    backend = step.settings.compile_backend
                    if reasons := compile_layers(handle, backend=backend, compiled=step.compiled):
                        why = next(iter(reasons.values()))
                        raise RuntimeError(f"{len(reasons)} layers cannot be compiled: {why}.")
            elif variant.ours and (numbering := number_padded_rows(model)) is not None:
                stack.enter_context(numbering)
        yield


def decoder_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of the decoder for a batch; GRPO stores prompts and completions apart."""
    if "input_ids" in batch:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}
    return {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
    }


def step_flops(step: BenchStep, layout: Layout, scored: int) -> float:
    """
    Least floating-point operations of a step on a batch, in which each distinct token is computed once:

        forward = 2 * weights * tokens + 4 * layers * heads * head_size * pairs + 2 * hidden_size * vocab_size * scored

    where `pairs` are those of a query and a key that it attends to. The policy's backward takes 2 forwards, with LoRA
    1 (frozen weights have no gradient). A pass without gradient is 1 forward. Recomputation is not counted.
    """
    model = find_pretrained(step.trainer.model)
    config, decoder = model.config, find_decoder(model)
    embeddings = model.get_input_embeddings().weight.numel()
    weights = sum(p.numel() for name, p in decoder.named_parameters() if "lora_" not in name) - embeddings
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int((layout.positions + 1).sum())  # a token at position p attends to p + 1 keys
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attending = sum(kind != "linear_attention" for kind in kinds)
    forward = (
        2 * weights * layout.packed_tokens
        + 4 * attending * config.num_attention_heads * head_size * pairs
        + 2 * config.hidden_size * config.vocab_size * scored
    )
    # Passes without gradient. DPO: the reference, with LoRA the policy without adapters. GRPO: the reference and the
    # policy before the step.
    references = 1 if step.settings.trainer == "dpo" else 2 * step.settings.logprob_passes
    return forward * ((2 if step.settings.lora else 3) + references)
