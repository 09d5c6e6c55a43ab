"""Which attention can run: on machines that are described rather than present, with packages that are pretended."""

from importlib import metadata

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2Config
from zoo.models import CONFIGS

from trl_padfix.core.attention import attention as kernels
from trl_padfix.core.attention import availability
from trl_padfix.core.attention.availability import (
    Machine,
    Workload,
    assess,
    best_backend,
    require_usable,
    spread,
)


CPU, T4, A100, H100, B200 = (
    Machine(),
    *(Machine("cuda", n, c) for n, c in {"T4": (7, 5), "A100": (8, 0), "H100": (9, 0), "B200": (10, 0)}.items()),
)
_import_obstacle = availability._import_obstacle
FLASH = ["flash_attention_2", "flash_attention_3", "flash_attention_4"]


@pytest.fixture
def installed(monkeypatch):
    """Pretends that packages are installed, and can be imported."""

    def install(**versions: str) -> None:
        given = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name):
            if name not in given:
                raise metadata.PackageNotFoundError(name)
            return given[name]

        monkeypatch.setattr(metadata, "version", version)

    monkeypatch.setattr(availability, "_import_obstacle", lambda module: None)
    monkeypatch.setattr(availability, "torch_varlen_is_complete", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    install()
    return install


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a network access")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


EVERYTHING = {"flash_attn": "2.8.3", "flash_attn_3": "3.0.0", "flash_attn_4": "4.0.0b36", "kernels": "0.18.2"}


def half(machine: Machine, **more) -> Workload:
    return Workload(machine, torch.bfloat16, **more)


WHERE_IT_RUNS = [
    (CPU, torch.bfloat16, [], "needs a CUDA GPU, and this is CPU"),
    (T4, torch.float16, [], "needs Ampere (compute capability 8.0) or newer, and this is 7.5"),
    (A100, torch.float32, [], "computes in float16 or bfloat16, not float32"),
    (A100, torch.bfloat16, FLASH[:2], "needs Hopper (compute capability 9.0) or newer, and this is 8.0"),
    (H100, torch.bfloat16, FLASH, None),
]


def test_flash_attention_runs_where_its_authors_say(installed):
    installed(**EVERYTHING)
    for machine, dtype, usable, obstacle in WHERE_IT_RUNS:
        found = [assess(name, Workload(machine, dtype)) for name in FLASH]
        assert [b.name for b in found if b.usable] == usable
        reasons = [b.reason for b in found if not b.usable]
        assert obstacle in reasons[0] if reasons else obstacle is None


FASTEST = [
    (CPU, EVERYTHING, "sdpa"),
    (T4, EVERYTHING, "sdpa"),
    (A100, EVERYTHING, "flash_attention_2"),
    (H100, EVERYTHING, "flash_attention_3"),
    (B200, EVERYTHING, "flash_attention_4"),
    (H100, {"flash_attn": "2.8.3"}, "flash_attention_2"),
    (H100, {"flash_attn": "1.0.9"}, "sdpa"),
    (H100, {"kernels": "0.18.2"}, "sdpa"),  # loading a Hub kernel asks the Hub
]


def test_auto_is_the_fastest_that_needs_no_network(installed, no_network):
    for machine, packages, chosen in FASTEST:
        installed(**packages)
        backend = best_backend(half(machine))
        assert (backend.name, backend.usable) == (chosen, True)
        assert backend.note


def test_a_package_that_cannot_be_imported_is_not_usable(installed, monkeypatch):
    def fail(module):
        raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocation\nmore")

    installed(flash_attn="2.8.3")
    monkeypatch.setattr("importlib.import_module", fail)
    monkeypatch.setattr(availability, "_import_obstacle", _import_obstacle.__wrapped__)
    backend = assess("flash_attention_2", half(H100))
    assert "cannot be imported (flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14So" in backend.reason
    assert backend.install.startswith("pip install flash-attn --no-build-isolation --force-reinstall")


def test_a_missing_package_is_an_import_error_and_the_rest_a_value_error(installed):
    message = (
        r"`attn_implementation='flash_attention_2'` cannot run on this H100 in bfloat16: flash-attn is not instal"
    )
    with pytest.raises(ImportError, match=message + r".*Usable: 'sdpa', 'flex_attention', 'eager', or 'auto'"):
        require_usable("flash_attention_2", half(H100), "attn_implementation")
    with pytest.raises(ValueError, match="it needs a CUDA GPU, and this is CPU") as refused:
        require_usable("flash_attention_2", half(CPU), "attn_implementation")
    assert "pip install" not in str(refused.value)
    installed(flash_attn="2.8.3")
    require_usable("flash_attention_2", half(H100), "attn_implementation")
    with pytest.raises(ValueError, match="not float32"):
        require_usable("flash_attention_2", Workload(H100), "attn_implementation")


# Hub kernels


def test_a_hub_kernel_is_looked_for_in_the_cache_only(installed, no_network, monkeypatch, tmp_path):
    installed(**EVERYTHING)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    name = "kernels-community/flash-attn2@v3"
    assert assess(name, half(H100)).note == "a Hub kernel, downloaded when it is first loaded"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "not in the local cache, and the Hub is switched off" in assess(name, half(H100)).reason
    (tmp_path / "models--kernels-community--flash-attn2" / "snapshots").mkdir(parents=True)
    assert assess(name, half(H100)).usable
    assert assess(name, half(H100)).note == "a Hub kernel"


# Models


OBSTACLES = [
    ("sdpa", CONFIGS["gemma2"](), "transformers has no sdpa path for Gemma2ForCausalLM"),
    ("sdpa", CONFIGS["gemma2"](), "it has no softcap, and this model was trained with one"),
    ("flash_attention_2", Qwen2Config(hidden_size=1024, num_attention_heads=2), "and this model's have 512"),
    ("flash_attention_2", CONFIGS["gpt_oss"](), "this model runs only with the FlashAttention of kernels-community/"),
    ("flex_attention", CONFIGS["gpt2"](), "transformers has no flex_attn path for GPT2LMHeadModel"),
]


def test_what_a_model_cannot_do_is_an_obstacle(installed):
    installed(**EVERYTHING)
    for name, config, obstacle in OBSTACLES:
        assert obstacle in assess(name, half(H100, config=config)).reason
        assert assess(name, half(H100, config=Qwen2Config())).usable


def test_a_registered_function_is_usable(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "mine", lambda *args: None)
    assert assess("mine", Workload()).usable


# Parts


def test_the_parts_of_a_vision_model_are_named_one_by_one(installed):
    config, parts = Qwen2_5_VLConfig(), {"text_config": "flash_attention_2", "vision_config": "sdpa"}
    assert spread(parts, config, "attn_implementation") == parts
    with pytest.raises(ImportError, match=r"\(text_config\) cannot run on this H100.*flash-attn is not installed"):
        require_usable(parts, half(H100, config=config), "attn_implementation")
    installed(**EVERYTHING)
    require_usable(parts, half(H100, config=config), "attn_implementation")
    with pytest.raises(ValueError, match=r"names \['tower'\].*are: 'text_config', 'vision_config'"):
        spread({"tower": "sdpa"}, config, "attn_implementation")


# torch's own


def test_torchs_varlen_attention_starts_with_ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, runs in {(7, 5): False, (8, 0): True}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args, found=capability: found)
        assert kernels.torch_varlen_is_complete.__wrapped__() == runs
