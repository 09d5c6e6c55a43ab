"""LLaMA-Factory from a YAML, as `llamafactory-cli train` takes it."""

import json

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
)
from kit.processes import trained


pytestmark = of_stack("llamafactory")

PAIRS = {
    "file_name": "rows.json",
    "ranking": True,
    "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
}
TEXTS = {"file_name": "rows.json", "columns": {"prompt": "prompt", "response": "chosen"}}
METHODS = {"sft": TEXTS, "dpo": PAIRS, "rm": PAIRS}


def config(folder, method: str, **more) -> str:
    """A YAML as users of LLaMA-Factory write it."""
    (folder / "dataset_info.json").write_text(json.dumps({"rows": METHODS.get(method, TEXTS)}))
    settings = {
        "model_name_or_path": str(folder / "model"),
        "stage": method,
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": str(folder),
        "template": "empty",
        "cutoff_len": 256,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_steps": STEPS,
        "output_dir": str(folder / "out"),
        "overwrite_output_dir": True,
        "disable_gradient_checkpointing": True,
        "report_to": "none",
        "use_cpu": True,
        "flash_attn": "sdpa",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | more))
    return "config.yaml"


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model", tied=False)  # its reward trainer does not save tied weights
    (tmp_path / "rows.json").write_text(json.dumps(preferences()))
    return tmp_path


PLUGIN = ("python", "-m", "trl_padfix.integrations.llamafactory")


@pytest.mark.parametrize("method", METHODS)
def test_our_module_starts_it_without_padding(method, folder):
    run("llamafactory-cli", "train", config(folder, method), folder=folder)
    theirs, shares = logged(folder / "out"), method != "sft"
    said = run(*PLUGIN, config(folder, method, padfix_prefix_sharing=shares), folder=folder)
    assert_equal_steps_of_fewer_tokens(logged(folder / "out"), theirs, shares=shares)
    assert said.count("): parity ok") == (2 if method == "dpo" else 1)  # policy and reference
    assert said.count("tokens were computed") == 1


AUTO = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}


def zero(folder, stage: int) -> dict[str, str]:
    """The key `deepspeed` of its YAML, with a file as those in its `examples/deepspeed`."""
    sharding = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    settings = dict.fromkeys(AUTO, "auto") | {"zero_allow_untested_optimizer": True, "zero_optimization": sharding}
    (folder / "deepspeed.json").write_text(json.dumps(settings))
    return {"deepspeed": str(folder / "deepspeed.json")}


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_sharded_models_are_served(strategy, folder):
    """Two processes on a CPU that pass for GPUs, as in the tests of our trainers."""
    if strategy == "fsdp2":
        launcher, settings = strategy, {}  # accelerate's configuration says it
    else:
        launcher, settings = "multi_gpu", zero(folder, int(strategy[-1]))
    figures, said = [], ""
    for module, name, more in (
        ("llamafactory.train.tuner", "run_exp", {}),
        ("trl_padfix.integrations.llamafactory", "train", {"padfix_prefix_sharing": True}),
    ):
        (folder / "start.py").write_text(f"from {module} import {name}\n\n{name}()\n")
        given = config(folder, "dpo", use_cpu=False, **settings, **more)
        gpus = {"ACCELERATE_TORCH_DEVICE": "cpu"}
        said = trained(launcher, folder, folder / "start.py", folder / given, env=gpus, timeout=900)
        figures.append(logged(folder / "out"))
    assert any(folder.glob("out/checkpoint-*/global_step*")) is (strategy != "fsdp2")  # DeepSpeed's shards
    assert_equal_steps_of_fewer_tokens(figures[1], figures[0])
    assert said.count("): parity ok") == 2


def test_its_own_command_stops_at_the_key_and_ours_without_it(folder):
    with pytest.raises(AssertionError, match="padfix_prefix_sharing"):
        run("llamafactory-cli", "train", config(folder, "sft", padfix_prefix_sharing=False), folder=folder)
    with pytest.raises(AssertionError, match="`padfix_prefix_sharing` is missing: set it to true, false or auto"):
        run(*PLUGIN, config(folder, "sft"), folder=folder)
    for key in ("packing", "neat_packing"):
        with pytest.raises(AssertionError, match=f"Set `{key}: false`"):
            run(*PLUGIN, config(folder, "sft", padfix_prefix_sharing=False, **{key: True}), folder=folder)
    with pytest.raises(AssertionError, match=r"`packing: true` \(the default of `stage: pt`\)"):
        run(*PLUGIN, config(folder, "pt", padfix_prefix_sharing=False), folder=folder)
