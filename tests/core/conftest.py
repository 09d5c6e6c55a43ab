"""Models with `flash_attention_2` on a CPU."""

import pytest
from simulated_gpu.flash_stand_in import flash_attention_stand_in


@pytest.fixture(scope="module")
def flash():
    with flash_attention_stand_in():
        yield
