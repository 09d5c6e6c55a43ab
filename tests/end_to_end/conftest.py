"""A model that the pages' scripts and commands are given."""

from pathlib import Path

import pytest
from datasets import load_dataset

from trl_padfix import build_tiny


PAIRS = Path(__file__).parents[2] / "recipes/data/preferences"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """The folder of a tiny Qwen2, with a tokenizer of the published pairs."""
    return build_tiny("tiny", load_dataset(str(PAIRS), split="train[:16]"), tmp_path_factory.mktemp("tiny") / "model")
