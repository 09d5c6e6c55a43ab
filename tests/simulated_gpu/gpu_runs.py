"""
Computations of the tests that need a GPU: models in half precision beside one in float32, packed and padded.

They run on the simulated device, too, so that what they notice is known without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from zoo.gpu_models import build, pairs, step

from trl_padfix import remove_padding
from trl_padfix.core.attention import attention


__all__ = ["CONFIG", "check_half_precision"]

CONFIG: dict[str, Any] = {"layers": 4, "hidden_size": 256, "intermediate_size": 512}


def check_half_precision(
    place: Callable[[Any], Any],
    *,
    implementation: str,
    autocast: bool,
    window: int | None,
    sharing: bool,
    columns: int = 700,
    varlen: bool = True,
    **config: Any,
) -> None:
    """
    In half precision packed is as close to float32 as padded is; with `varlen` on torch's variable-length kernel.

    `place` takes a model or a tensor to the device. Rows are longer than a block of a kernel.
    """
    config = CONFIG | {"use_sliding_window": window is not None, "sliding_window": window} | config
    exact = place(build(implementation="eager", max_window_layers=0, **config))
    dtype = torch.float32 if autocast else torch.bfloat16
    half = place(build(dtype=dtype, implementation=implementation, max_window_layers=0, **config))
    ids, mask = (place(x) for x in pairs(8, columns, columns * 4 // 7))
    logps, gradient = step(exact, ids, mask)
    padded_logps, padded_gradient = step(half, ids, mask, autocast=autocast)
    counted = mock.patch.object(attention, "attend_torch_varlen", wraps=attention.attend_torch_varlen)
    with counted as attend, remove_padding(half, prefix_sharing=sharing) as handle:
        packed_logps, packed_gradient = step(half, ids, mask, autocast=autocast)
    if implementation == "sdpa" and varlen:
        assert attend.call_count == config["layers"], f"{attend.call_count} layers ran on the varlen kernel"
    assert handle.stats.packed_tokens < handle.stats.padded_tokens
    assert (packed_logps - logps).abs().mean() <= 1.5 * (padded_logps - logps).abs().mean() + 1e-3
    error = lambda g: ((g - gradient).norm() / gradient.norm()).item()  # noqa: E731
    assert error(packed_gradient) <= 1.5 * error(padded_gradient) + 1e-3
