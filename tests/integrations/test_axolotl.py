"""`axolotl train config.yml`."""

import inspect

import pytest
import yaml
from kit.foreign_stacks import (
    STEPS,
    assert_equal_steps_of_fewer_tokens,
    logged,
    of_stack,
    preferences,
    run,
    save_model,
    write_lines,
)


pytestmark = of_stack("axolotl")

PLUGIN = {"plugins": ["trl_padfix.integrations.axolotl.PaddingRemovalPlugin"]}
PAIRS = {
    "rl": "dpo",
    "type": {
        "field_prompt": "prompt",
        "field_chosen": "chosen",
        "field_rejected": "rejected",
        "prompt_format": "{prompt}",
        "chosen_format": " {chosen}",
        "rejected_format": " {rejected}",
    },
}
TEXTS = {"type": {"field_instruction": "prompt", "field_output": "chosen", "format": "{instruction} "}}
METHODS = {"dpo": PAIRS, "sft": TEXTS}


def config(folder, method: str, **more) -> str:
    """A YAML as users of axolotl write it."""
    settings = dict(METHODS[method])
    data = {"path": str(folder / "rows.jsonl"), "ds_type": "json", "split": "train", "type": settings.pop("type")}
    settings |= {
        "base_model": str(folder / "model"),
        "datasets": [data],
        "sequence_len": 256,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-4,
        "optimizer": "adamw_torch",
        "seed": 42,  # axolotl shuffles differently in each run without one
        "lr_scheduler": "constant",
        "bf16": False,
        "tf32": False,
        "attn_implementation": "sdpa",
        "logging_steps": 1,
        "save_steps": STEPS,
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"),
        "special_tokens": {"pad_token": "<|pad|>"},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(settings | more))
    return "config.yml"


def train(folder, method: str, **more) -> tuple[list[dict], str]:
    command = ("axolotl", "train", config(folder, method, **more), "--launcher", "python")
    said = run(*command, folder=folder, AXOLOTL_DO_NOT_TRACK="1")
    return logged(folder / "out"), said


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    write_lines(tmp_path / "rows.jsonl", preferences())
    return tmp_path


@pytest.mark.parametrize("method", METHODS)
def test_a_yaml_removes_padding(method, folder):
    theirs, _ = train(folder, method)
    ours, said = train(folder, method, **PLUGIN, padfix_prefix_sharing=method == "dpo")
    assert_equal_steps_of_fewer_tokens(ours, theirs, shares=method == "dpo")
    assert said.count("): parity ok") == (2 if method == "dpo" else 1)  # policy and reference
    assert said.count("tokens were computed") == 1
    if method == "dpo":
        assert [logs[0]["rewards/margins"] for logs in (ours, theirs)] == [0, 0]


@pytest.mark.parametrize("key", ["sample_packing", "batch_flattening"])
def test_packing_beside_it_is_refused(key, folder):
    with pytest.raises(AssertionError, match=f"Set `{key}: false`, or leave the plug-in out"):
        train(folder, "sft", **PLUGIN, **{key: True})


def test_the_keys_are_the_arguments_of_the_callback():
    from trl_padfix import PaddingRemovalCallback
    from trl_padfix.integrations.axolotl import PaddingRemovalArgs

    arguments = inspect.signature(PaddingRemovalCallback).parameters
    assert set(PaddingRemovalArgs.model_fields) == {f"padfix_{name}" for name in arguments}
