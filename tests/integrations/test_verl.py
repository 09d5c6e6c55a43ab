"""
verl's FSDP engine on a CPU: its SFT trainer over two processes, and the engines of actor and critic in this one.

`nox -s plugins` has an environment with verl.
"""

import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from datasets import Dataset
from kit.foreign_stacks import STEPS, assert_equal_steps, of_stack, preferences, run, save_model

from trl_padfix import PaddingRemovalError
from trl_padfix.core.handle import PaddingRemoval
from trl_padfix.versions import installed_version


pytestmark = of_stack("verl")

PLUGIN = "trl_padfix.integrations.verl"
KINDS = {"actor": "language_model", "critic": "value_model"}
SHARING = pytest.mark.parametrize("sharing", ["0", "1"], ids=["padding-free", "prefix sharing"])

if installed_version("verl"):
    from simulated_gpu.verl_on_cpu import PLATFORM, entered


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("verl") / "model").parent


# Its own entry point


def train(folder, name: str, *more: str, **environment: str) -> tuple[list[dict], int]:
    """What ten steps on two processes have logged, and the tokens that entered the model."""
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]
        for row in preferences(8 * STEPS)
    ]
    Dataset.from_dict({"messages": chats}).to_parquet(folder / "rows.parquet")
    command = (
        "torchrun", "--nproc-per-node", "2", "--standalone", "-m", "verl.trainer.sft_trainer",
        "data.train_files=rows.parquet", "data.train_batch_size=8", "data.micro_batch_size_per_gpu=4",
        "data.use_dynamic_bsz=false", "data.max_length=256", "data.num_workers=0",
        f"model.path={folder}/model", "+model.override_config.attn_implementation=sdpa",
        "model.use_remove_padding=false", "model.enable_gradient_checkpointing=false", "engine.strategy=fsdp2",
        "engine.use_torch_compile=false", "+engine.mixed_precision.param_dtype=fp32", "optim.lr=1e-4",
        f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=1", "trainer.logger=[file]",
        "trainer.device=cpu", f"trainer.default_local_dir={folder}/{name}", *more,
    )  # fmt: skip
    log = folder / f"{name}.jsonl"
    said = run(*command, folder=folder, VERL_FILE_LOGGER_PATH=str(log), **PLATFORM | environment)
    found = re.findall(r"entered (\d+) tokens", said)
    assert len(found) == 2
    line = "trl_padfix removes padding from Qwen2ForCausalLM in verl's FSDPEngineWithLMHead"
    assert said.count(line) == any(PLUGIN in word for word in more)
    logs = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    return [{k.removeprefix("train/"): v for k, v in log.items()} for log in logs], sum(map(int, found))


@pytest.fixture(scope="module")
def theirs(folder):
    return train(folder, "theirs")


@SHARING
def test_its_sft_trainer_takes_the_same_steps_with_fewer_tokens(sharing, folder, theirs):
    plugin = f"model.external_lib={PLUGIN}"
    ours, computed = train(folder, f"ours_{sharing}", plugin, TRL_PADFIX_PREFIX_SHARING=sharing)
    assert_equal_steps(ours, theirs[0])
    print(f"{computed / theirs[1]:.0%} of the padded tokens computed")
    real = sum(log["global_tokens"] for log in ours)
    assert (computed < real) if sharing == "1" else (computed == real)
    assert real < theirs[1]


def test_the_overrides_of_the_docs_are_those_of_its_configuration():
    import verl
    from hydra import compose, initialize_config_dir

    docs = (Path(__file__).parents[2] / "docs" / "other_stacks.md").read_text()
    (overrides,) = re.findall(r"## verl.*?```text\n(.*?)```", docs, re.DOTALL)
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=overrides.split())
    for part in (config.actor_rollout_ref, config.critic):
        assert (part.model.external_lib, part.model.use_remove_padding) == (PLUGIN, False)
    assert config.ray_kwargs.ray_init.runtime_env.env_vars == {"TRL_PADFIX_PREFIX_SHARING": "auto"}


# The engines of actor and critic


@pytest.fixture(scope="module", autouse=True)
def platform():
    from verl.plugin.platform import platform_manager

    with pytest.MonkeyPatch.context() as patch:
        for name in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE"):
            patch.setenv(name, PLATFORM[name])
        patch.setattr(platform_manager, "_current_platform", None)
        torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


def load_token_classifier(local_path, torch_dtype, model_config, trust_remote_code):
    """As verl's `load_valuehead_model`, which asks for FlashAttention-2 whatever is installed."""
    auto = transformers.AutoModelForTokenClassification
    return auto.from_pretrained(local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa")


def build_engine(folder, kind: str, external_lib: str | None, use_remove_padding=False, strategy="fsdp2"):
    """As verl's workers make one."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    model = HFModelConfig(
        path=str(folder / "model"), model_type=KINDS[kind], external_lib=external_lib,
        use_remove_padding=use_remove_padding, enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    torch.manual_seed(0)
    engine = EngineRegistry.new(
        model_type=KINDS[kind], backend=strategy, model_config=model,
        engine_config=FSDPEngineConfig(
            strategy=strategy, use_torch_compile=False, mixed_precision={"param_dtype": "fp32"}
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-4, total_training_steps=STEPS),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    with mock.patch("verl.utils.model.load_valuehead_model", load_token_classifier):
        engine.initialize()
    return engine


def batches():
    """Groups of four completions of one prompt, as nested tensors."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        prompt = torch.randint(3, 200, (int(torch.randint(5, 20, (), generator=draw)),), generator=draw)
        lengths = torch.randint(2, 25, (4,), generator=draw).tolist()
        rows = [torch.cat([prompt, torch.randint(3, 200, (n,), generator=draw)]) for n in lengths]
        values = {
            "input_ids": rows,
            "position_ids": [torch.arange(len(row)) for row in rows],
            "loss_mask": [torch.ones(len(row)) for row in rows],
        }
        nested = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in values.items()}
        data = TensorDict(nested, batch_size=4)
        tu.assign_non_tensor(
            data, use_remove_padding=False, use_dynamic_bsz=False, micro_batch_size_per_gpu=4, temperature=1.0,
            pad_token_id=0,
        )  # fmt: skip
        yield data


def loss_function(model_output, data=None, dp_group=None):
    (values,) = (model_output[name] for name in ("log_probs", "values") if name in model_output)
    weights = torch.linspace(-1, 1, values.values().numel())
    return (values.values() * weights).mean(), {}


def steps_of(engine) -> tuple[list[dict], int]:
    """Loss and gradient norm of ten steps, each after a forward without gradients, and the tokens that entered."""
    entered.clear()
    found = []
    for data in batches():
        with engine.eval_mode():
            scored = engine.infer_batch(data.clone())["model_output"]
        with engine.train_mode():
            step = engine.train_batch(data, loss_function)
        (values,) = (scored[name] for name in ("log_probs", "values") if name in scored)
        found.append({"loss": step["loss"][0], "grad_norm": step["metrics"]["grad_norm"], "scored": values.values()})
    return found, sum(entered)


@SHARING
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_its_engines_are_the_same_with_fewer_tokens(kind, sharing, folder, monkeypatch):
    monkeypatch.setenv("TRL_PADFIX_PREFIX_SHARING", sharing)
    theirs, padded = steps_of(build_engine(folder, kind, None))
    engine = build_engine(folder, kind, PLUGIN)
    ours, computed = steps_of(engine)
    assert_equal_steps(ours, theirs)
    torch.testing.assert_close(*(torch.cat([step["scored"] for step in found]) for found in (ours, theirs)))
    stats = PaddingRemoval.of(engine.module).stats
    assert computed == stats.packed_tokens < stats.padded_tokens == padded
    assert (stats.packed_tokens < stats.real_tokens) is (sharing == "1")
    print(f"{computed / padded:.0%} of the padded tokens computed")


def test_its_own_padding_removal_and_engines_that_build_another_model_are_refused(folder):
    with pytest.raises(PaddingRemovalError, match="Set `use_remove_padding=false`"):
        build_engine(folder, "actor", PLUGIN, use_remove_padding=True)
    with pytest.raises(PaddingRemovalError, match=r"strategies \('fsdp', 'fsdp2'\), and 'fsdp_turbo' builds its own"):
        build_engine(folder, "actor", PLUGIN, strategy="fsdp_turbo")


def test_bad_settings_are_refused_when_it_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    monkeypatch.setenv("TRL_PADFIX_PREFIX_SHARING", "maybe")
    with pytest.raises(ValueError, match="is 0, 1 or auto, got 'maybe'"):
        __import__(PLUGIN)
