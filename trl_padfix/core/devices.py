"""The devices that a decoder is on."""

from __future__ import annotations

from torch import nn


__all__ = ["refuse_devices"]


def refuse_devices(decoder: nn.Module) -> str | None:
    """Why a decoder whose layers are on several devices cannot be packed, or `None` if they are on one."""
    found = dict.fromkeys(str(p.device) for p in decoder.parameters() if p.device.type != "meta")
    found |= dict.fromkeys(str(d) for d in _map_of(decoder).values() if d not in ("cpu", "disk"))
    names = list(dict.fromkeys(f"cuda:{name}" if name.isdigit() else name for name in found))
    if len(names) < 2:
        return None
    return (
        f"its layers are on several devices ({', '.join(names)}), and the layout of a packed batch is on one. Load it "
        "without `device_map` and split it over processes (FSDP2, DeepSpeed), or onto one GPU (`device_map={'': 0}`)"
    )


def _map_of(decoder: nn.Module) -> dict:
    """Where accelerate sends the parts of a decoder while it runs, offloaded weights among them."""
    hooks = ((name, getattr(module, "_hf_hook", None)) for name, module in decoder.named_modules())
    devices = ((name, getattr(hook, "execution_device", None)) for name, hook in hooks)
    return {name: device for name, device in devices if device is not None}
