"""TRL's kernels of its heads against the formulas in float64: log-probabilities, entropies, divergences, gradients."""

from __future__ import annotations

import pytest
import torch
from kit.cells import slow_but


pytest.importorskip("triton")
heads = pytest.importorskip("trl.kernels", reason="this version of TRL has no kernels")

from simulated_gpu.interpreted import counted_kernels, trl_on_triton, worst_of_all  # noqa: E402
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction  # noqa: E402
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS  # noqa: E402


pytestmark = pytest.mark.kernels

TOKENS, HIDDEN, VOCAB = 11, 16, 1300  # more than a block of the kernels, and no multiple of one
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
FAST = [torch.float32, torch.bfloat16]


def leaves(values: list[torch.Tensor], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Values rounded to `dtype`, and the same in float64."""
    rounded = [x.to(dtype).requires_grad_() for x in values]
    return rounded, [x.detach().double().requires_grad_() for x in rounded]


def entropies(logps: torch.Tensor) -> torch.Tensor:
    return -(logps.exp() * logps).sum(-1)


def chunked_logps(dtype: torch.dtype, softcap: float | None, temperature: float, scale: float, off: int = 0) -> float:
    torch.manual_seed(0)
    given, exact = leaves([torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)], dtype)
    targets = torch.randint(VOCAB, (TOKENS,))
    with trl_on_triton(), counted_kernels() as launches:
        got = heads.ChunkedLogProbFunction.apply(*given, targets, temperature, 500, softcap, scale, OPTIONAL_OUTPUTS)
        logits = (exact[0] @ exact[1].T + exact[2]) * scale
        logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature
        logps, targets = logits.log_softmax(-1), (targets + off) % VOCAB
        chosen = logps.gather(-1, targets[:, None]).squeeze(-1)
        more = (2 * logps).exp().sum(-1).log(), logits.mean(-1), logits.argmax(-1) == targets
        error = worst_of_all(got, (chosen, entropies(logps), *more), given, exact)
    assert launches == {"_forward_kernel": 3, "_backward_kernel": 3}
    return error


@pytest.mark.parametrize("dtype", slow_but(FAST, DTYPES), ids=str)
@pytest.mark.parametrize("asked", [(None, 1.0, 1.0), (5.0, 0.7, 0.5)], ids=["plain", "softcap, temperature, scale"])
def test_chunked_log_probabilities(asked, dtype):
    assert chunked_logps(dtype, *asked) < TOLERANCE[dtype]


def logps_and_entropies(dtype: torch.dtype, masked: bool, offset: int, off: int = 0) -> float:
    torch.manual_seed(0)
    given, exact = leaves([torch.randn(2, TOKENS + 1, VOCAB)], dtype)
    index = torch.randint(VOCAB, (2, TOKENS))
    mask = torch.rand(index.shape) > 0.3 if masked else torch.ones_like(index, dtype=torch.bool)
    view = slice(offset, TOKENS + offset)  # logits of next tokens are a slice, as trainers take it
    with counted_kernels() as launches:
        got = heads.selective_log_softmax_and_entropy(given[0][:, view], index, 0.7, mask if masked else None)
        logps, index = (exact[0][:, view] / 0.7).log_softmax(-1), (index + off) % VOCAB
        wanted = logps.gather(-1, index[..., None]).squeeze(-1), entropies(logps)
        got, wanted = ([x.where(mask, 0) for x in outputs] for outputs in (got, wanted))
        error = worst_of_all(got, wanted, given, exact)
    assert launches == {"_forward_kernel": 1, "_backward_kernel": 1}
    return error


@pytest.mark.parametrize("dtype", slow_but(FAST, DTYPES), ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_log_probabilities_and_entropies_of_logits(masked, dtype):
    assert logps_and_entropies(dtype, masked, offset=int(masked)) < TOLERANCE[dtype]


def divergences(dtype: torch.dtype, beta: float, softcap: float | None, other: float | None = None) -> float:
    torch.manual_seed(0)
    student, teacher = ([torch.randn(n, HIDDEN) for n in (TOKENS, VOCAB)] for _ in range(2))
    given, exact = leaves(student, dtype)
    frozen = [x.to(dtype) for x in teacher]
    with trl_on_triton(), counted_kernels() as launches:
        caps = 1.0, softcap, 1.0, softcap
        got = ChunkedDivergenceFunction.apply(*given, None, *frozen, None, beta, 0.7, *caps)
        beta = beta if other is None else other

        def logps(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            logits = hidden @ weight.T
            return ((softcap * torch.tanh(logits / softcap) if softcap else logits) / 0.7).log_softmax(-1)

        p, q = logps(*exact), logps(*(x.double() for x in frozen))
        mean = ((1 - beta) * p.exp() + beta * q.exp()).log()
        parts = [(x.exp() * (x - y)).sum(-1) for x, y in ((q, p), (p, q), (q, mean), (p, mean))]
        divergence = parts[0] if beta == 0 else parts[1] if beta == 1 else beta * parts[2] + (1 - beta) * parts[3]
        error = worst_of_all(got, (divergence, entropies(p).detach()), given, exact)
    assert sum(launches.values()) >= 2
    return error


@pytest.mark.parametrize("dtype", slow_but(FAST[:1], DTYPES), ids=str)
@pytest.mark.parametrize(("beta", "softcap"), [(0.0, None), (0.5, 5.0), (1.0, None)])
def test_divergences_of_a_student_from_a_teacher(beta, softcap, dtype):
    assert divergences(dtype, beta, softcap) < TOLERANCE[dtype]


def test_other_targets_and_another_divergence_would_be_seen():
    assert chunked_logps(torch.float32, None, 1.0, 1.0, off=1) > 0.1
    assert logps_and_entropies(torch.float32, False, 0, off=1) > 0.1
    assert divergences(torch.float32, 0.5, None, other=0.4) > 0.01
