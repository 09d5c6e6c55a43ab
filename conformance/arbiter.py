"""The arbiter: each row by itself, without padding, without neighbors, in float64 wherever the model allows it."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func


IGNORED = -100


@dataclass(frozen=True)
class Row:
    """One row of training data: a document, a dialogue."""

    ids: list[int]
    labels: list[int]
    """One for each id, not shifted; -100 where there is no loss."""
    more: dict[str, torch.Tensor] = field(default_factory=dict)
    """More arguments of the model: images, or a mask with a hole. Only padded batches have such rows."""

    @classmethod
    def of(cls, ids: list[int]) -> Row:
        """A row with a label for each token but the first, which nothing predicts."""
        return cls(ids, [IGNORED, *ids[1:]])

    def unlabelled(self) -> Row:
        return replace(self, labels=[IGNORED] * len(self.ids))

    def targets(self) -> int:
        """Labels that a row alone has a prediction for."""
        return sum(label != IGNORED for label in self.labels[1:])


class Pair(NamedTuple):
    """A preference: the chosen answer to a prompt, and the rejected one."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class Step(NamedTuple):
    """What a stack computes in one optimizer step, before the optimizer moves."""

    loss: float
    gradients: dict[str, torch.Tensor]
    """Of each parameter that has one, by its name in `model.named_parameters()`."""
    size: float = 1.0
    """The largest logit; the arbiter fills it in."""
    rounding: float = 0.0
    """How far the gradients of the rows alone are off in float32; the arbiter fills it in."""


FLOAT32 = {
    "blt": "Its masks hold the smallest number of their precision, which is -inf in its softmax in float32.",
    "inkling2_loop_text": "It casts states to float32 before weights that are not cast.",
    "inkling2_text": "It casts states to float32 before weights that are not cast.",
    "xglm": "It makes a float32 tensor of the smallest number of the precision of its scores.",
}
"""Types of models that cannot run in float64, and why: their rows alone are computed in float32."""


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def in_precision(model: torch.nn.Module, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """A copy of a model in float64 or another precision, its experts one by one. What casts to float32 stays so."""
    copied = copy.deepcopy(model).to(dtype)
    for module in copied.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config.dtype = dtype
            config._experts_implementation = "eager"  # the grouped product of torch has no float64
            config._attn_implementation = "eager"  # others leave out what they lack: soft caps, sinks
    return copied


def alone(model: torch.nn.Module, rows: list[Row], *, balances: bool = True) -> Step:
    """
    The mean loss of all labels, and its gradients, from rows that are computed one by one.

    The load-balancing loss of experts, unless it is left out (`balances`), is that of all tokens of all rows, none of
    them padding. In float32 the same is computed once more: it says how much a model amplifies rounding (a delta net
    does).
    """
    rounded = _alone(in_precision(model, torch.float32), rows, balances)
    if model.config.model_type in FLOAT32:
        return rounded
    exact = _alone(in_precision(model), rows, balances)
    return exact._replace(rounding=_gradients_off(rounded, exact))


def _alone(exact: torch.nn.Module, rows: list[Row], balances: bool) -> Step:
    total, count, routed, size = 0.0, sum(row.targets() for row in rows), [], 1.0
    exact.eval()
    frequencies = {name: b.clone() for name, b in exact.named_buffers() if "inv_freq" in name}
    for row in rows:
        _forget_lengths(exact, frequencies)
        output = exact(input_ids=torch.tensor([row.ids]), use_cache=False, **_like(exact, row.more))
        size = max(size, float(output.logits.detach().abs().max()))
        labels = torch.tensor(row.labels[1:], dtype=torch.long)
        total = total + torch.nn.functional.cross_entropy(output.logits[0, :-1], labels, reduction="sum")
        routed.append(getattr(output, "router_logits", None) or ())
    loss = total / count
    if balances and (config := _balanced(exact)):
        layers = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
        balance = load_balancing_loss_func(layers, config.num_experts, config.num_experts_per_tok)
        loss = loss + config.router_aux_loss_coef * balance
    loss.backward()
    return Step(float(loss.detach()), {n: p.grad for n, p in exact.named_parameters() if p.grad is not None}, size)


def preferences(model: torch.nn.Module, reference: torch.nn.Module, pairs: list[Pair], beta: float) -> Step:
    """The loss of DPO, its mean over pairs, from answers that are computed one by one."""
    exact, fixed = in_precision(model).eval(), in_precision(reference).eval()
    total = 0.0
    for prompt, *answers in pairs:
        chosen, rejected = (_answer(exact, prompt, a) - _answer(fixed, prompt, a).detach() for a in answers)
        total = total - torch.nn.functional.logsigmoid(beta * (chosen - rejected))
    loss = total / len(pairs)
    loss.backward()
    return Step(float(loss.detach()), gradients(exact))


def _answer(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probability of an answer."""
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum()


def _balanced(model: torch.nn.Module) -> Any:
    """The config of a model that trains its router, else `None`."""
    return model.config if getattr(model.config, "output_router_logits", False) else None


def _like(model: Any, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in more.items()}


def _forget_lengths(model: torch.nn.Module, frequencies: dict[str, torch.Tensor]) -> None:
    """Dynamic rotary embeddings keep the frequencies of the longest row that they have met."""
    for name, module in model.named_modules():
        if (kept := frequencies.get(f"{name}.inv_freq")) is not None and hasattr(module, "max_seq_len_cached"):
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq = kept.clone()


DEVIATIONS = 8
"""Standard deviations that are allowed: one of 10**8 draws is beyond."""

CONTROL = 10
"""A leak that is planted must be off by this many tolerances."""


def tolerance(size: float, *, terms: int, depth: int, dtype: torch.dtype = torch.float32) -> float:
    """
    The largest difference that rounding explains between two computations of one number.

    An operation on numbers of `size` rounds by at most `u * size`, `u = eps / 2`. The errors of `terms` summands add
    up to `sqrt(terms)` of that, those of `depth` such sums behind one another to `sqrt(depth)` times as much (Higham
    and Mary, "A new approach to probabilistic rounding error analysis", 2019). Another order of summation, another
    kernel or another number of threads is within it.
    """
    return DEVIATIONS * torch.finfo(dtype).eps / 2 * size * math.sqrt(terms * depth)


AMPLIFIED = 4
"""Other orders of summation may be off by this many times what the rows alone are in float32."""


def _gradients_off(got: Step, exact: Step) -> float:
    """The largest difference of a parameter's gradient, relative to the largest gradient."""
    size, nothing = max(float(g.norm()) for g in exact.gradients.values()), torch.zeros(())
    return max(
        float((got.gradients.get(name, nothing).double() - g.double()).norm()) / size
        for name, g in exact.gradients.items()
    )


class Difference(NamedTuple):
    """How far a step is from the arbiter's, in tolerances; at most 1 is rounding."""

    loss: float
    """Difference of the losses, in nats."""
    gradient: float
    """Largest difference of a parameter's gradient, relative to the largest gradient of the model (by norm)."""
    allowed: tuple[float, float]
    """What rounding explains, of the loss and of the gradient."""

    @property
    def leaks(self) -> bool:
        return not (self.loss <= self.allowed[0] and self.gradient <= self.allowed[1])  # nan leaks

    @property
    def tolerances(self) -> float:
        return max(self.loss / self.allowed[0], self.gradient / self.allowed[1])


def difference(model: torch.nn.Module, got: Step, exact: Step) -> Difference:
    """Compare a step with the arbiter's. A sum is at most as long as the vocabulary, or the layer is wide."""
    config = model.config.get_text_config()
    parts = [config] if hasattr(config, "hidden_size") else [getattr(config, name) for name in config.sub_configs]
    terms = max(config.vocab_size, *(4 * part.hidden_size for part in parts))
    sums = 8 * sum(part.num_hidden_layers for part in parts)
    allowed = tolerance(1.0, terms=terms, depth=2 * sums)
    return Difference(
        abs(got.loss - exact.loss),
        _gradients_off(got, exact),
        (tolerance(exact.size, terms=terms, depth=sums), max(allowed, AMPLIFIED * exact.rounding)),
    )
