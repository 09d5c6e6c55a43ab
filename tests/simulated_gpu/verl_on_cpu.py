"""
A CPU as a platform of verl, which finds it by `PLATFORM` in the environment; its processes talk through gloo.

Tokens that enter the first layer of a Qwen2 are counted, and what a process has counted is printed when it ends.
"""

import atexit
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed
from torch.nn.modules.module import register_module_forward_pre_hook
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


PLATFORM = {
    "VERL_USE_EXTERNAL_MODULES": "simulated_gpu.verl_on_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # for which verl keeps its engines
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
}
entered: list[int] = []
"""Tokens of each forward."""


def nothing(*args, **kwargs) -> int:
    return 0


NOTHING = (
    "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved",
    "memory_allocated", "memory_reserved", "reset_peak_memory_stats", "set_allocator_settings", "set_device",
    "synchronize",
)  # fmt: skip


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    vars().update(dict.fromkeys(NOTHING, nothing))
    device_name, vendor_name = "cpu", "none"
    device_module = SimpleNamespace(
        **vars(torch.cpu) | dict.fromkeys(NOTHING, nothing),
        get_device_name=lambda *args: "CPU",
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        mem_get_info=lambda *args: (0, 1),
    )

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"


def count(module, args):
    if type(module).__name__.endswith("Qwen2DecoderLayer") and module.self_attn.layer_idx == 0:
        entered.append(args[0].shape[:2].numel())


register_module_forward_pre_hook(count)
atexit.register(lambda: print(f"entered {sum(entered)} tokens"))

# verl asks for a backend of "cpu" and for one of the platform's device, which torch takes for a device given twice.
init_process_group = distributed.init_process_group
distributed.init_process_group = lambda backend=None, **given: init_process_group("gloo", **given)
