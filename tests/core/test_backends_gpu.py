"""On a CUDA GPU: each attention backend in half precision, as close to float32 as the padded forward is."""

import pytest
import torch
from simulated_gpu.gpu_runs import CONFIG, check_half_precision
from zoo.gpu_models import build, pairs, step

from trl_padfix import prefix_sharing_layout, remove_padding
from trl_padfix.core.attention.segments import gather_keys
from trl_padfix.core.attention.varlen import torch_varlen_is_complete


pytestmark = pytest.mark.gpu


def implementations() -> list:
    flash = pytest.param(
        "flash_attention_2",
        marks=pytest.mark.skipif(not _has_flash_attn(), reason="flash-attn is not installed: pip install flash-attn"),
    )
    return ["sdpa", "eager", flash]


def _has_flash_attn() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return is_flash_attn_2_available()


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "fp32 under autocast"])
@pytest.mark.parametrize("implementation", implementations())
def test_bf16_packed_is_as_close_to_float32_as_bf16_padded(implementation, autocast, window, sharing):
    check_half_precision(
        lambda x: x.cuda(),
        implementation=implementation,
        autocast=autocast,
        window=window,
        sharing=sharing,
        varlen=torch_varlen_is_complete(),
    )


@pytest.mark.parametrize("sharing", [False, True])
def test_float32_on_the_gpu_equals_the_padded_computation(sharing):
    model = build(**CONFIG).cuda()
    ids, mask = (x.cuda() for x in pairs(8, 700, 400))
    logps, gradient = step(model, ids, mask)
    with remove_padding(model, prefix_sharing=sharing):
        packed_logps, packed_gradient = step(model, ids, mask)
    assert (packed_logps - logps).abs().max() < 1e-4
    assert ((packed_gradient - gradient).norm() / gradient.norm()).item() < 1e-4


def test_the_gradients_of_shared_keys_are_the_same_in_every_run():
    ids, mask = (x.cuda() for x in pairs(8, 700, 400))
    layout = prefix_sharing_layout(ids, mask)
    states = torch.randn(1, 2, layout.packed_tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(1, 2, layout.key_index.numel(), 64, device="cuda", dtype=torch.bfloat16)
    runs = [torch.autograd.grad(gather_keys(states, layout), states, upstream)[0] for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)
