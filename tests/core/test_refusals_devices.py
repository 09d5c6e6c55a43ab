"""Models whose layers are on several devices are refused."""

from __future__ import annotations

import pytest
from accelerate.hooks import AlignDevicesHook
from simulated_gpu.simulated_cuda import to_simulated
from torch import nn
from zoo.gpu_models import build

from trl_padfix import PaddingRemovalError, remove_padding


def test_layers_on_several_devices_are_refused(gpu):
    model = build()
    to_simulated(model.model.layers[1])
    with pytest.raises(PaddingRemovalError, match=r"several devices \(cpu, cuda:0\).*without `device_map`"):
        remove_padding(model)
    remove_padding(to_simulated(model)).remove()


def test_copies_that_share_a_decoder_are_refused():
    with pytest.raises(PaddingRemovalError, match="one process per GPU"):
        remove_padding(nn.DataParallel(build()))


def test_layers_that_are_sent_to_several_gpus_are_refused():
    model = build()
    for index, layer in enumerate(model.model.layers):
        layer._hf_hook = AlignDevicesHook(execution_device=index)
    with pytest.raises(PaddingRemovalError, match="cuda:0, cuda:1"):
        remove_padding(model)
