"""
Memory of the copies of keys that shared prefixes need: each segment reads the keys of its whole path.

    python benchmarks/key_copies.py
    python benchmarks/key_copies.py --prompt 8192 --group 32

One layer of Qwen2.5-0.5B's width (14 heads of 64) in float32 on a CPU, a group of completions of 256 tokens behind one
prompt, with 2 heads of keys (its own) and with 14. live: MiB that live between forward and backward, without weights
and ids. copied: the same if the graph keeps the copies. checkpointed: peak of forward and backward with the layer
checkpointed. The copies of one layer and their gradients are part of it.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import bench
import torch
from transformers import Qwen2Config, Qwen2Model

from trl_padfix import remove_padding
from trl_padfix.core.attention import segments


COMPLETION = 256


def build(key_heads: int, is_checkpointed: bool) -> Qwen2Model:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=1,
        num_attention_heads=14,
        num_key_value_heads=key_heads,
    )
    model = Qwen2Model(config).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def live_mib(model: Qwen2Model, prompt: int, group: int, with_backward: bool) -> float:
    """MiB that live after the forward, or at the peak of forward and backward."""
    ids = torch.randint(3, 256, (group, prompt + COMPLETION))
    ids[:, :prompt] = ids[0, :prompt]
    profile: Any
    with (
        remove_padding(model, prefix_sharing=True),
        bench.profiled(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        states = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        if with_backward:
            states.backward(torch.ones_like(states))
    live = bench.live_bytes(profile)
    return (max(live) if with_backward else live[-1] - states.nbytes) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--group", type=int, nargs="+", default=[8, 32])
    options = parser.parse_args()
    columns = "heads of keys", "group", "prompt", "live", "copied", "checkpointed", "copies and their gradients"
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for key_heads in (2, 14):
        for group in options.group:
            for prompt in options.prompt:
                copies = 4 * key_heads * 64 * 4 * group * (prompt + COMPLETION) / 2**20
                live = live_mib(build(key_heads, False), prompt, group, False)
                with mock.patch.object(segments, "COPIES", 10**12):
                    copied = live_mib(build(key_heads, False), prompt, group, False)
                peak = live_mib(build(key_heads, True), prompt, group, True)
                cells = " | ".join(f"{figure:,.0f}" for figure in (live, copied, peak, copies))
                print(f"| {key_heads} | {group} | {prompt:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
