"""Models with `flash_attention_2` on a CPU."""

from __future__ import annotations

import pytest
from simulated_gpu.flash_stand_in import flash_attention_stand_in


@pytest.fixture(autouse=True, scope="module")
def _flash_attention():
    with flash_attention_stand_in():
        yield
