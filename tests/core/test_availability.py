"""Which attention can run: on machines that are described rather than present, with packages that are pretended."""

import pytest
import torch
from transformers import Qwen2Config
from zoo.models import CONFIGS

from trl_padfix.core.attention import attention as kernels
from trl_padfix.core.attention import availability
from trl_padfix.core.attention.availability import FLASH_PACKAGES, Machine, attention_obstacle, fastest_attention


CPU, T4, A100, H100, B200 = Machine(), *(Machine("cuda", c) for c in [(7, 5), (8, 0), (9, 0), (10, 0)])
EVERYTHING = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


@pytest.fixture
def installed(monkeypatch):
    """Pretends that the packages of these implementations can be imported, and no others."""

    def install(*names: str) -> None:
        modules = {FLASH_PACKAGES[name].module for name in names} | {"kernels"}
        monkeypatch.setattr(availability, "_import_failure", lambda module: None if module in modules else "none here")

    install(*EVERYTHING)
    return install


WHERE_IT_RUNS = [
    (CPU, torch.bfloat16, [], "needs a CUDA GPU"),
    (T4, torch.float16, [], "needs a GPU of compute capability 8.0 or later, and this one has 7.5"),
    (A100, torch.float32, [], "computes in float16 or bfloat16, not float32"),
    (A100, torch.bfloat16, EVERYTHING[:2], "needs a GPU of compute capability 9.0 or later, and this one has 8.0"),
    (H100, torch.bfloat16, EVERYTHING, None),
]


def test_flash_attention_runs_where_its_authors_say(installed):
    for machine, dtype, usable, obstacle in WHERE_IT_RUNS:
        found = {name: attention_obstacle(name, machine, dtype) for name in EVERYTHING}
        assert [name for name, reason in found.items() if reason is None] == [*usable]
        reasons = [reason for reason in found.values() if reason]
        assert obstacle in reasons[0] if reasons else obstacle is None
    for machine, obstacle in {CPU: "it needs a CUDA GPU", A100: None}.items():
        assert attention_obstacle("kernels-community/flash-attn2", machine, torch.bfloat16) == obstacle


FASTEST = [
    (CPU, EVERYTHING, "sdpa"),
    (T4, EVERYTHING, "sdpa"),
    (A100, EVERYTHING, "flash_attention_2"),
    (H100, EVERYTHING, "flash_attention_3"),
    (B200, EVERYTHING, "flash_attention_4"),
    (H100, ["flash_attention_2"], "flash_attention_2"),
    (H100, [], "sdpa"),  # loading a Hub kernel asks the Hub
]


def test_auto_is_the_fastest_that_runs(installed):
    for machine, packages, chosen in FASTEST:
        installed(*packages)
        name, obstacles = fastest_attention(machine, torch.bfloat16)
        assert name == chosen
        assert all(obstacles.values())
    assert obstacles["flash_attention_2"].endswith("to install it: `pip install flash-attn --no-build-isolation`")


def test_a_package_that_cannot_be_imported_cannot_run(monkeypatch):
    def fail(module):
        raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocation\nmore")

    monkeypatch.setattr("importlib.import_module", fail)
    monkeypatch.setattr(availability, "_import_failure", availability._import_failure.__wrapped__)
    reason = attention_obstacle("flash_attention_2", H100, torch.bfloat16)
    assert "fails (flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocation); to" in reason


OBSTACLES = [
    ("sdpa", CONFIGS["gemma2"](), "transformers has no sdpa path for Gemma2ForCausalLM"),
    ("sdpa", Qwen2Config(attn_logit_softcapping=30.0), "it has no softcap, and this model was trained with one"),
    ("flash_attention_2", Qwen2Config(hidden_size=1024, num_attention_heads=2), "and this model's have 512"),
    ("flash_attention_2", CONFIGS["gpt_oss"](), "this model runs only with the FlashAttention of kernels-community/"),
    ("flex_attention", None, "would need a block mask per layout"),
    ("telepathy", None, "is not known to attend over variable-length segments"),
]


def test_what_a_model_cannot_do_is_an_obstacle(installed):
    for name, config, obstacle in OBSTACLES:
        assert obstacle in attention_obstacle(name, H100, torch.bfloat16, config)
        assert config is None or attention_obstacle(name, H100, torch.bfloat16, Qwen2Config()) is None


# torch's own


def test_torchs_varlen_attention_starts_with_ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, runs in {(7, 5): False, (8, 0): True}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args, found=capability: found)
        assert kernels.torch_varlen_is_complete.__wrapped__() == runs
