"""
A forward and backward of several processes that share every row, against the padded one of a single process.

[`main`] prints a line of JSON for each case: the largest difference of the loss, of log-probabilities or logits, and
of a gradient (the mean over processes, relative to the parameter's or to 1 % of the largest one of the model), with
the tokens that a layer of each process was given.
`BROKEN` is `exit` or `slice`: the negative controls.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers as tf
from kit.observe import entered_tokens
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from trl.trainer.utils import add_fused_lm_head

from trl_padfix import check_parity, remove_padding, split_rows
from trl_padfix.core.context import context
from trl_padfix.core.parallel import collectives
from trl_padfix.core.parallel.local import ContextParallelTokens


__all__ = ["MODELS", "assert_split", "counted"]

SHAPE: dict[str, Any] = dict(
    vocab_size=60, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.15, pad_token_id=0,
)  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
DELTA = dict(
    layer_types=["linear_attention", "linear_attention", "full_attention"], linear_key_head_dim=8,
    linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
MAMBA = dict(
    mamba_n_heads=6, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8, attn_layer_indices=[2],
    mamba_expand=2,
)  # fmt: skip
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
MODELS: dict[str, tuple[type, dict[str, Any], str]] = {
    "qwen2": (tf.Qwen2Config, {}, "sdpa"),
    "qwen2-8-heads": (tf.Qwen2Config, {"num_attention_heads": 8, "hidden_size": 64}, "sdpa"),
    "qwen2-5-heads": (tf.Qwen2Config, {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40}, "sdpa"),
    "qwen3-tied": (tf.Qwen3Config, {"tie_word_embeddings": True}, "sdpa"),
    "gemma2-softcap": (tf.Gemma2Config, {"sliding_window": 5, "attn_logit_softcapping": 2.0}, "eager"),
    "gpt-oss-sinks": (tf.GptOssConfig, SINKS, "eager"),
    "qwen3-moe": (tf.Qwen3MoeConfig, MOE, "sdpa"),
    "qwen3.5-delta-rule": (tf.Qwen3_5TextConfig, DELTA, "sdpa"),
    "bamba-mamba2": (tf.BambaConfig, MAMBA, "sdpa"),
}
LAYERS = ("Qwen2DecoderLayer", "LlamaDecoderLayer", "Gemma3DecoderLayer")
BATCHES = (
    *("pairs", "sft", "logits", "one row", "labels at the end", "one token", "one label", "rows of one length"),
    *("one row more than once", "one row, filler"),
)
LENGTH = 64
"""Of the part of each process, with filler."""


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    """Pairs of a prompt and two answers; rows that begin alike, with labels everywhere; or a single row."""
    draw = torch.Generator().manual_seed(1)

    def tokens(n: int) -> list[int]:
        return torch.randint(1, 60, (n,), generator=draw).tolist()

    if kind == "pairs":
        # With shared prompts 35 and 26 tokens, and 61: two processes compute whole rows.
        prompts = [tokens(n) for n in (19, 7, 9)]
        parts = [
            (p, tokens(n)) for answers in ((11, 3, 20), (5, 16, 32)) for p, n in zip(prompts, answers, strict=True)
        ]
    elif kind == "rows of one length":  # with no padding between them, and nothing in common
        parts = [(tokens(9), tokens(10)) for _ in range(3)]
    else:
        first = tokens(9)
        parts = [([], first + tokens(n)) for n in ((43,) if kind.startswith("one ") else (14, 3, 21, 8))]
        parts *= 3 if kind == "one row more than once" else 1
    length = max(len(prompt) + len(answer) for prompt, answer in parts)
    rows = [prompt + answer for prompt, answer in parts]
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    unasked = torch.tensor([[i < len(prompt) for i in range(length)] for prompt, _ in parts]) | ~mask.bool()
    labels = ids.masked_fill(unasked, -100)
    if kind == "labels at the end":
        labels[:, :-5] = -100  # some processes have none
    if kind == "one label":
        labels[:, :-1] = -100
    cut = slice(2 if kind == "one token" else None)  # fewer tokens than processes, if there are more than two
    return {"input_ids": ids[:, cut], "attention_mask": mask[:, cut], "labels": labels[:, cut]}


def values_of(model: nn.Module, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and what it is made of: log-probabilities, or logits of real tokens."""
    batch = batch_of(kind)
    if kind == "logits":
        output = model(**batch)
        return output.loss, output.logits[batch["attention_mask"].bool()]
    output = model(**batch, fused_lm_head=True)
    loss = output.loss
    if kind == "pairs":
        chosen, rejected = output.log_probs.sum(1).chunk(2)
        loss = -nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
        loss = loss if output.aux_loss is None else loss + 0.01 * output.aux_loss
    return loss, output.log_probs


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a model, zeros where there is none; the model is left without."""
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return grads


def average(grads: dict[str, torch.Tensor]) -> None:
    """Make gradients their means over the processes."""
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient, relative to the parameter's or to 1 % of the largest one of the model."""
    floor = max(grad.norm() for grad in expected.values()) / 100
    return max(float((found[name] - grad).norm() / max(grad.norm(), floor)) for name, grad in expected.items())


def tell(case: dict[str, Any], key: str) -> None:
    """Print a line of JSON, in the first process, with what each process has as `key`."""
    of_each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_each, case.get(key))
    if dist.get_rank() == 0:
        print(json.dumps(case | {key: of_each}), flush=True)


def run(name: str, kind: str, checkpointing: bool, sharing: bool | None) -> tuple:
    """Loss, values, gradients, the tokens of a layer and the parity report; padded, with `sharing` of `None`."""
    config, more, implementation = MODELS[name]
    torch.manual_seed(0)
    made = tf.AutoModelForCausalLM.from_config(config(**SHAPE | more), attn_implementation=implementation).train()
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
    model: Any = made
    add_fused_lm_head(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    entered = entered_tokens(model)
    packed, report = 0, None
    if sharing is not None:
        multiple = LENGTH if kind.endswith("filler") else None
        handle = remove_padding(model, prefix_sharing=sharing, packed_multiple_of=multiple)
        split_rows(handle)
    loss, values = values_of(model, kind)
    loss.backward()
    grads = take_gradients(model)
    if sharing is not None:
        packed = handle.stats.packed_tokens + handle.stats.filler_tokens
        report = check_parity(model, batch_of(kind)) if kind == "sft" else None
        average(grads)
    return loss.detach(), values.detach(), grads, (entered[0], packed), report


def cases(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    for name, kind, checkpointing in product(names, BATCHES, (False, True)):
        if checkpointing and kind not in ("pairs", "sft"):
            continue
        loss, values, grads, *_ = run(name, kind, checkpointing, None)
        for sharing in (False, True):
            own = run(name, kind, checkpointing, sharing)
            yield {
                "case": [name, kind, f"{sharing=}", f"{checkpointing=}"],
                "loss": (own[0] - loss).abs().item(),
                "values": (own[1] - values).abs().max().item(),
                "gradients": difference(own[2], grads),
                "tokens": own[3][0],
                "packed": own[3][1],
                "parity": own[4] and {"ok": own[4].ok, "gradient": own[4].gradient, "compared": own[4].compared},
            }


def break_it(how: str) -> None:
    if how == "exit":
        backward = collectives._AllGatherForLoss.backward
        collectives._AllGatherForLoss.backward = staticmethod(  # type: ignore[method-assign]
            lambda ctx, grad: (backward(ctx, grad)[0] / ctx.group.size, None, None)
        )
    if how == "slice":
        cut = ContextParallelTokens.local
        ContextParallelTokens.local = lambda self, x, dim=0: cut(self, x.roll(1, dim) if dim else x, dim)  # type: ignore[method-assign]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """
    Count within packed forwards: local tokens, tokens of the packed rows, calls of a layer (and those with states of
    shared prefixes), all-to-alls, and the numbers that they send.
    """
    counts: dict[str, int] = dict.fromkeys(("local", "packed", "calls", "all_to_alls", "sent"), 0)
    all_to_all = collectives._all_to_all

    def count(module: Any, args: Any) -> None:
        call = context().packed
        # FSDP2 gives the class of a layer a name of its own.
        # The parity check computes a row alone on each process.
        if call is not None and call.tokens.is_divided and type(module).__name__.endswith(LAYERS):
            counts["local"] += args[0].shape[:-1].numel()
            counts["packed"] += call.layout.packed_tokens
            counts["calls"] += 1

    def counted_all_to_all(group: Any, sent: torch.Tensor, *sizes: Any) -> Any:
        counts["all_to_alls"] += 1
        counts["sent"] += sent.numel()
        return all_to_all(group, sent, *sizes)

    hook = register_module_forward_pre_hook(count)  # of all modules
    with mock.patch.object(collectives, "_all_to_all", counted_all_to_all):
        yield counts
    hook.remove()


def assert_split(counts: list[dict[str, int]]) -> None:
    """Each process has computed about half of the tokens of every layer; an output was gathered for every forward."""
    assert counts[0]["packed"] == counts[1]["packed"] == sum(count["local"] for count in counts)
    for count in counts:
        assert count["all_to_alls"] > 0 < count["calls"]
        assert abs(2 * count["local"] - count["packed"]) <= count["calls"]


def main(*models: str) -> None:
    dist.init_process_group("gloo")
    break_it(os.environ.get("BROKEN", ""))
    for case in cases(models):
        tell(case, "tokens")
