"""
What the tests of many processes launch: `trl_padfix.train`, on a machine without a GPU.

accelerate shards a model (FSDP, ZeRO) over devices that it knows, and processes on CPU are none to it: with `use_cpu`
it takes DDP whatever it is asked for. Here they pass for GPUs that talk through gloo.

`BROKEN_LAYOUT=1` lets the packed rows of a batch see each other: the negative control.
"""

import os
import sys
from dataclasses import replace

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from trl_padfix import decoder
from trl_padfix.train import main


def leaking(build):
    """All rows of a batch as one: each sees those before it."""

    def leaking_layout(*args):
        mask = args[-1] if len(args) == 1 else args[1]
        return replace(build_padding_free(mask.reshape(1, -1)), batch_shape=tuple(mask.shape))

    build_padding_free = decoder.padding_free_layout
    return leaking_layout


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu" and "WORLD_SIZE" in os.environ:
        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    if os.environ.get("BROKEN_LAYOUT"):
        decoder.prefix_sharing_layout = leaking(decoder.prefix_sharing_layout)
    main(sys.argv[1], sys.argv[2:])
