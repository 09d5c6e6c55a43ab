"""One training step of TRL's own trainers on batches that are given: built, timed, its memory and its arithmetic."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
import trl.trainer.dpo_trainer as trl_dpo
import trl.trainer.sft_trainer as trl_sft

from ...core.call.batch_metadata import share_layouts
from ...core.heads import skip_first_comparison
from ...core.layout.layout import Layout
from ...core.model.find import find_decoder, find_pretrained
from ...core.remove import number_padded_rows, remove_padding
from ...trainers.data.batch_metadata import BATCH_LAYOUT, LayoutCollator
from ...trainers.data.collators import DataCollatorForLanguageModeling, DataCollatorForPreference
from .peak import wait


if TYPE_CHECKING:
    from .settings import BenchSettings, Variant

__all__ = ["Step", "attached", "decoder_inputs", "step_flops"]


COLLATORS = {
    trl_dpo.DataCollatorForPreference: DataCollatorForPreference,
    trl_sft.DataCollatorForLanguageModeling: DataCollatorForLanguageModeling,
}


class Step:
    """A training step of one of TRL's trainers, on any batch of the prepared `rows` it was built for."""

    def __init__(self, trainer: Any, rows: list[dict[str, Any]], settings: BenchSettings, rendered: str | None = None):
        self.trainer, self.rows, self.settings = trainer, rows, settings
        self.rendered = rendered  # by what chat template conversations were; `None` for other data
        self.compiled: dict[Any, Any] = {}  # layers, compiled once for all steps
        if settings.liger:
            from transformers.integrations.liger import apply_liger_kernel  # `train()` calls it

            apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
        if settings.gradient_checkpointing:
            trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        if settings.dtype == "autocast":  # as `train()` does; the reference is prepared already
            trainer.model = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        weights = [p for p in trainer.model.parameters() if p.requires_grad]
        trainer.optimizer = torch.optim.AdamW(weights, lr=0.0, weight_decay=0.0)  # weights stay equal

    @property
    def models(self) -> list[torch.nn.Module]:
        return [m for m in (self.trainer.model, getattr(self.trainer, "ref_model", None)) if m is not None]

    def batch(self, rows: list[int], side: str = "right", flat: bool = False) -> dict[str, torch.Tensor]:
        """The collated batch of some rows, on the device: by TRL's collator, padded or `flat`, or left by ours."""
        collator = self.trainer.data_collator
        if flat:
            collator = replace(collator, padding_free=True)
        if side == "left":
            given = {f.name: getattr(collator, f.name) for f in fields(collator)}
            collator = COLLATORS[type(collator)](**given, padding_side="left")
        return self.trainer._prepare_inputs(collator([self.rows[i] for i in rows]))

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        """What the loss is a mean over: pairs, for SFT labelled tokens."""
        if "labels" in batch:
            return int((batch["labels"][:, 1:] != -100).sum())
        return len(next(iter(batch.values()))) // (2 if "input_ids" in batch else 1)

    def run(self, batch: dict[str, torch.Tensor], variant: Variant) -> dict[str, float]:
        """Time one step; its loss and gradient, and on CUDA its peak memory."""
        cuda = self.settings.device == "cuda"
        # Fresh tensors: a layout found on a batch that was seen before would not be paid for.
        batch = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        host = {k: v.cpu() for k, v in batch.items() if isinstance(v, torch.Tensor)}
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
        """A step with the layout that the collator makes of a batch on the host: it is paid for here."""
        batch_metadata = (
            LayoutCollator(lambda _: host, variant.shares)([]).get(BATCH_LAYOUT) if variant.packed else None
        )
        known = batch_metadata.beside(batch, self.settings.device).known(batch) if batch_metadata is not None else []
        with share_layouts(known, deferred_checks=[]):  # which nobody reads: nobody writes to these batches
            if backward:
                return self.trainer.training_step(self.trainer.model, batch, None)
            with self.trainer.compute_loss_context_manager():
                return self.trainer.compute_loss(self.trainer.model, batch)

    def kept_mib(self, batch: dict[str, torch.Tensor], variant: Variant) -> float:
        """What the graph of a step keeps for its backward, each storage once; weights and the batch left out."""
        host = {k: v.cpu() for k, v in batch.items()}
        given = [*batch.values(), *(p for model in self.models for p in model.parameters())]
        own = {tensor.untyped_storage().data_ptr() for tensor in given}
        kept: dict[int, int] = {}
        alive = []  # so that no address is used again

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                alive.append(storage)
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.forward_and_backward(batch, host, variant, backward=False)
        return sum(kept.values()) / 2**20

    def peak_gib(self, batch: dict[str, torch.Tensor], variant: Variant) -> float:
        """Peak memory of a step on CPU: models and optimizer, and the most that is held beside them at one time."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with _profiled(activities=activities, profile_memory=True) as profile:
            self.run(batch, variant)
        held = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        state = [v for s in self.trainer.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        kept = [*state, *(p for model in self.models for p in model.parameters())]
        return (peak + sum(t.numel() * t.element_size() for t in kept)) / 2**30

    def profile(self, batch: dict[str, torch.Tensor], variant: Variant, top: int = 12) -> str:
        """Where the time of a step goes: a table of its operations, the longest first."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.settings.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with _profiled(activities=activities) as profile:
            self.run(batch, variant)
        key = "self_cuda_time_total" if self.settings.device == "cuda" else "self_cpu_time_total"
        return profile.key_averages().table(sort_by=key, row_limit=top, max_name_column_width=50)


def _profiled(**how: Any) -> torch.profiler.profile:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its log is for its makers; read before the first profile
    return torch.profiler.profile(**how)


def _projected(gradient: torch.Tensor) -> float:
    """
    Product with a fixed vector: linear in the gradient, so that the gradients of batches that split the same rows
    otherwise can be added up and compared without keeping any.
    """
    flat = gradient.flatten()
    return torch.dot(flat.float(), torch.arange(len(flat), device=flat.device).float().cos()).item()


@contextlib.contextmanager
def attached(step: Step, variant: Variant) -> Iterator[None]:
    """What a variant attaches to the models of a step, until the block ends."""
    with contextlib.ExitStack() as stack:
        for model in step.models:
            if variant.packed:
                handle = stack.enter_context(remove_padding(model, prefix_sharing=variant.shares))
                skip_first_comparison(handle)  # a training compares them once, in its first step
                if variant.compiled:
                    from ...core.attention.compiled import compile_layers

                    if left := compile_layers(handle, backend=step.settings.compile_backend, compiled=step.compiled):
                        raise RuntimeError(f"{len(left)} layers cannot be compiled: {next(iter(left.values()))}.")
            elif variant.ours and (numbering := number_padded_rows(model)) is not None:
                stack.enter_context(numbering)
        yield


def decoder_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ids and mask that a batch puts through the decoder."""
    if "input_ids" in batch:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}
    return {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
    }


def step_flops(step: Step, layout: Layout, scored: int) -> float:
    """
    Floating-point operations that a step on a batch needs at the least: of its distinct real tokens, its causal pairs
    of them and its scored positions, each once.

    A forward takes 2 for each weight and token, and 4 for each head size, head, layer and pair. The policy's backward
    takes twice that, with LoRA once (no gradient of the weights that stay); a pass without gradient is a forward.
    Nothing is counted for recomputation.
    """
    model = find_pretrained(step.trainer.model)
    config, decoder = model.config, find_decoder(model)
    embeddings = model.get_input_embeddings().weight.numel()
    weights = sum(p.numel() for name, p in decoder.named_parameters() if "lora_" not in name) - embeddings
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int((layout.positions + 1).sum())
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attending = sum(kind != "linear_attention" for kind in kinds)
    forward = (
        2 * weights * layout.packed_tokens
        + 4 * attending * config.num_attention_heads * head_size * pairs
        + 2 * config.hidden_size * config.vocab_size * scored
    )
    # DPO's reference (with LoRA the policy without its adapters); GRPO's, and the policy before the step.
    references = 1 if step.settings.trainer == "dpo" else 2 * step.settings.logprob_passes
    return forward * ((2 if step.settings.lora else 3) + references)
