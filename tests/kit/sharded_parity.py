"""Steps of FSDP1, which accelerate has on GPUs only, with a parity check between a backward pass and its step."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from kit.trainer_runs import build_model
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from trl_padfix import check_parity, remove_padding
from trl_padfix.core.parity import check


def losses(rank: int, checks: bool) -> list[float]:
    model = build_model()
    remove_padding(model)
    units = partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen2DecoderLayer})
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=units, use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    ids, mask = torch.arange(1, 13).view(2, 6) + rank, torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    found = []
    for _ in range(3):
        loss = sharded(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        if checks:
            assert check_parity(sharded, {"input_ids": ids, "attention_mask": mask}).ok
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main(folder: str) -> dict[str, Any]:
    rank = Accelerator(cpu=True).process_index
    unchecked, checked = losses(rank, False), losses(rank, True)
    with mock.patch.object(check, "reshard_parameters"):
        stale = losses(rank, True)
    return {"unchecked": unchecked, "checked": checked, "stale": stale}
