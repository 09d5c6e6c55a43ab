"""A training step of a TRL trainer on prepared batches: its time, memory and arithmetic."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
import trl.trainer.dpo_trainer as trl_dpo
import trl.trainer.sft_trainer as trl_sft
from transformers import Trainer

from ...core.call.batch_metadata import share_layouts
from ...core.call.runner_patch import attach_runner_patch
from ...core.context import within
from ...core.heads import trust_metadata
from ...core.layout.layout import Layout
from ...core.layout.shared_prefixes import PrefixPlan
from ...core.model.find import find_decoder, find_pretrained
from ...core.remove import attachment_of, number_padded_rows, remove_padding
from ...trainers.batching.bin_packing import pack_by_budget
from ...trainers.batching.measures import batch_costs
from ...trainers.batching.micro_batches import items_of
from ...trainers.batching.prefix_schedule import MicroBatchRunner, ids_and_masks, plan_on_host, sharing_obstacle
from ...trainers.data.batch_metadata import batch_metadata_of
from ...trainers.data.collators import DataCollatorForLanguageModeling, DataCollatorForPreference
from ...trainers.data.layout_collator import LayoutCollator
from ...trainers.temporary_attributes import temporarily_set
from .peak import wait


if TYPE_CHECKING:
    from .settings import BenchSettings, Variant

__all__ = ["BenchStep", "attached", "decoder_inputs", "host_copy", "profiled", "saved_storages", "step_flops"]


COLLATORS = {
    trl_dpo.DataCollatorForPreference: DataCollatorForPreference,
    trl_sft.DataCollatorForLanguageModeling: DataCollatorForLanguageModeling,
}
"""Collators of this package by those of TRL that they extend: they take a `padding_side`."""


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
        self.left_out: dict[str, str] = {}  # variants that are not measured, with the reason
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

    def batch(self, rows: list[int], side: str = "right", flat: bool = False) -> dict[str, torch.Tensor]:
        """
        Collate rows and move the batch to the device. TRL's collator pads on the right or, with `flat`, concatenates
        the rows; this package's collator pads on the left.
        """
        collator = self.trainer.data_collator
        if flat:
            collator = replace(collator, padding_free=True)
        if side == "left":
            kwargs = {f.name: getattr(collator, f.name) for f in fields(collator)}
            collator = COLLATORS[type(collator)](**kwargs, padding_side="left")
        return self.trainer._prepare_inputs(collator([self.rows[i] for i in rows]))

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        """
        Number of items that the loss averages over: pairs, for SFT labelled tokens, for GRPO completions. Losses of
        batches that divide the same rows differently are compared by their means with these weights.
        """
        if "labels" in batch:
            return int((batch["labels"][:, 1:] != -100).sum())
        # DPO batches hold 2 rows per pair: all chosen ones, then all rejected ones.
        return len(next(iter(batch.values()))) // (2 if "input_ids" in batch else 1)

    def run(self, batch: dict[str, torch.Tensor], variant: Variant) -> dict[str, float]:
        """Run a step and return its seconds, loss, gradient norm and projection, and on CUDA its peak memory."""
        cuda = self.settings.device == "cuda"
        # New tensors: a layout that an earlier step cached for the same tensors would cost this one nothing.
        batch = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        host = host_copy(batch)
        wait(self.settings.device)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
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
        Run a step, or its forward only.

        `host` is the batch on the CPU, from which the layout is built here. A training builds it in a data loader
        worker; here its cost is part of the step, as is the division into micro-batches.
        """
        if variant.has_budget and backward:
            return self._train_in_micro_batches(batch, host)
        known_batches = []
        if variant.packed and (metadata := batch_metadata_of(LayoutCollator(lambda _: host, variant.shares)([]))):
            known_batches = metadata.for_device(batch, self.settings.device).known_batches(batch)
        # Deferred checks detect modified batches. Nothing modifies these, so the list is dropped unread.
        with share_layouts(known_batches, deferred_checks=[]):
            if backward:
                return self.trainer.training_step(self.trainer.model, batch, None)
            with self.trainer.compute_loss_context_manager():
                loss = self.trainer.compute_loss(self.trainer.model, batch)
            assert isinstance(loss, torch.Tensor)  # no outputs were asked for
            return loss

    def micro_batches(
        self, batch: dict[str, Any], host: dict[str, torch.Tensor]
    ) -> tuple[list[dict[str, Any]], PrefixPlan | None]:
        """The micro-batches of a step under the token budget, and the plan of the prefixes that they share."""
        rows_per_item = 2 if self.settings.trainer == "dpo" else 1
        costs = batch_costs(host["input_ids"], host["attention_mask"], rows_per_item, sharing=True)
        budget = self.settings.max_tokens_per_batch or math.ceil(costs.tokens.sum() / 2)
        count, columns = len(host["input_ids"]) // rows_per_item, host["input_ids"].shape[1]
        result = []
        for items in pack_by_budget(costs, budget):
            longest = int(items_of(host, items, count)["attention_mask"].sum(1).max())
            rows = items_of(batch, items, count)
            per_token = {name for name, value in rows.items() if value.dim() > 1 and value.shape[1] == columns}
            result.append({name: value[:, :longest] if name in per_token else value for name, value in rows.items()})
        handles = [attachment_of(model) for model in self.models]
        if any(h is None or sharing_obstacle(h, self.trainer.args, is_sharded=False) for h in handles):
            return result, None
        plan = plan_on_host([(ids.cpu(), mask.cpu()) for ids, mask in ids_and_masks(result)], budget)
        return result, plan and plan.to(self.settings.device)

    def _train_in_micro_batches(self, batch: dict[str, Any], host: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run a step as `max_tokens_per_batch` trains it: a prefix of several micro-batches is computed once."""
        batches, plan = self.micro_batches(batch, host)
        runner, compute = MicroBatchRunner(len(batches), plan, ids_and_masks(batches)), self.trainer.compute_loss
        loss = torch.zeros((), device=self.settings.device)
        for i, micro_batch in enumerate(batches):
            runner.start(i)
            share = self.weight(micro_batch) / self.weight(batch)

            def weighted(*args: Any, share: float = share, **kwargs: Any) -> Any:
                loss = compute(*args, **kwargs)
                assert isinstance(loss, torch.Tensor)  # no outputs were asked for
                return loss * share

            with within(runner=runner), temporarily_set(self.trainer, "compute_loss", weighted):
                loss = loss + self.trainer.training_step(self.trainer.model, micro_batch, None)
        runner.check()
        return loss

    def kept_mib(self, batch: dict[str, torch.Tensor], variant: Variant) -> float | None:
        """
        MiB that the graph of a step saves for its backward; weights and the batch are left out. `None` for a step of
        several backwards.
        """
        if variant.has_budget:
            return None
        weights = [p for model in self.models for p in model.parameters()]
        with saved_storages([*batch.values(), *weights]) as saved:
            self.forward_and_backward(batch, host_copy(batch), variant, backward=False)
        return sum(storage.nbytes() for storage in saved.values()) / 2**20

    def peak_gib(self, batch: dict[str, torch.Tensor], variant: Variant) -> float:
        """Peak memory of a step on CPU, in GiB: models, optimizer state, and the largest sum of live allocations."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with profiled(activities=activities, profile_memory=True) as profile:
            self.run(batch, variant)
        live = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":  # positive: an allocation; negative: a release
                live += event.nbytes()
                peak = max(peak, live)
        state = [v for s in self.trainer.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        permanent = [*state, *(p for model in self.models for p in model.parameters())]
        return (peak + sum(t.numel() * t.element_size() for t in permanent)) / 2**30

    def profile(self, batch: dict[str, torch.Tensor], variant: Variant, top: int = 12) -> str:
        """The `top` operations of a step by time, as the profiler prints them."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.settings.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with profiled(activities=activities) as profile:
            self.run(batch, variant)
        key = "self_cuda_time_total" if self.settings.device == "cuda" else "self_cpu_time_total"
        return profile.key_averages().table(sort_by=key, row_limit=top, max_name_column_width=50)


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


def host_copy(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a batch on the CPU, as a data loader worker has them."""
    return {name: value.cpu() for name, value in batch.items() if isinstance(value, torch.Tensor)}


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
                trust_metadata(handle)  # a training verifies it once, in its first step, which is not timed here
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
