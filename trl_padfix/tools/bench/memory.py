"""Counts the memory of a step before it runs: a step that does not fit is killed by the system without a word."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
import trl.trainer.utils as trl_utils

from ...core.model.find import find_pretrained
from ..counted_step import StepSettings
from ..model_sizes import ModelSizes


if TYPE_CHECKING:
    from .steps import BenchStep

__all__ = ["MemoryCount", "free_bytes"]

WIDTH_BYTES = 100
"""Bytes of a token in a layer for each unit of its width, at the most: about 12 tensors, of up to 8 bytes."""

HEAD_TILE = (2048, 32768)
"""Tokens and entries of the vocabulary that TRL's fused LM head scores at a time, from TRL 1.10 on."""

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the limit of a container, of which `psutil` knows nothing."""


def free_bytes(device: str) -> int:
    """Memory that this process can still allocate on a device, in bytes."""
    if device == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    used = psutil.Process().memory_info().rss
    limits = [text for path in map(Path, LIMITS) if path.exists() and (text := path.read_text().strip()).isdigit()]
    return min([psutil.virtual_memory().available, *(int(text) - used for text in limits)])


class MemoryCount:
    """
    Bytes that the steps of a benchmark need beside its models.

    Args:
        step ([`BenchStep`]):
            The step to measure.
    """

    def __init__(self, step: BenchStep):
        self.settings, self.config = step.settings, find_pretrained(step.trainer.model).config

    @cached_property
    def _sizes(self) -> ModelSizes:
        return ModelSizes.of(self.config)

    def needed(self, tokens: int, mask_shape: tuple[int, int], enough: int) -> int:
        """
        Bytes of a step in which the decoder computes `tokens`.

        Args:
            tokens (`int`):
                Tokens of the forward.
            mask_shape (`tuple[int, int]`):
                `(B, L)` of a padded forward, whose attention has masks or scores `(B, L, L)`; else `(0, 0)`.
            enough (`int`):
                Bytes that are certainly there: far below them a rough figure will do, since counting takes seconds.

        Raises:
            NotImplementedError: If the layers of the model cannot be counted.
        """
        config, settings = self.config, self.settings
        size = settings.weights_dtype.itemsize
        squares = mask_shape[0] * mask_shape[1] ** 2
        attention = squares * (1 + size)  # the mask, as booleans and as numbers
        if settings.attn == "eager":  # scores and weights of each layer are kept
            attention += 2 * config.num_hidden_layers * config.num_attention_heads * squares * size
        width = config.hidden_size + config.intermediate_size
        rough = WIDTH_BYTES * width * config.num_hidden_layers * tokens + attention
        if 10 * rough < enough:
            return rough
        whole_head = not hasattr(trl_utils, "add_fused_lm_head")
        counted = self._sizes.step(
            StepSettings(
                checkpointing=settings.gradient_checkpointing,
                lora=settings.lora,
                autocast=settings.dtype == "autocast",
                dtype=settings.computed_dtype,
                whole_head=whole_head,
            )
        )
        rows, columns = min(tokens, HEAD_TILE[0]), min(config.vocab_size, HEAD_TILE[1])
        scores = 0 if whole_head else 4 * rows * (HEAD_TILE[1] + 3 * columns)  # a buffer, and three copies in float32
        states = 1 + 2 * settings.optimizer  # a gradient, and AdamW's two moments, which the first step allocates
        per_token = counted.kept + counted.working
        return int(states * size * counted.trained + counted.fixed + scores + per_token * tokens + attention)
