"""
The classes of verl's FSDP engine, which needs a GPU to be started: a module that it builds, and its steps on it.

`nox -s plugins` has an environment with verl.
"""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from kit.foreign_stacks import STEPS, of_stack, save_model

from trl_padfix import PaddingRemovalError
from trl_padfix.core.remove import attachment_of


pytestmark = of_stack("verl")

PLUGIN = "trl_padfix.integrations.verl"
KINDS = {"actor": "language_model", "critic": "value_model"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def load_token_classifier(local_path, torch_dtype, model_config, trust_remote_code):
    """As verl's `load_valuehead_model`, which asks for FlashAttention-2 whatever is installed."""
    auto = transformers.AutoModelForTokenClassification
    return auto.from_pretrained(local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa")


def build_engine(folder, kind: str, external_lib: str | None, use_remove_padding: bool = False):
    """An engine with the module that verl builds; only its sharding over GPUs is left out."""
    import importlib

    from verl.workers.engine.fsdp import transformer_impl as impl

    if external_lib:
        importlib.import_module(external_lib)
    engine_class = impl.FSDPEngineWithLMHead if kind == "actor" else impl.FSDPEngineWithValueHead
    engine = object.__new__(engine_class)
    vars(engine).update(
        model_config=SimpleNamespace(
            model_type=KINDS[kind], hf_config=transformers.AutoConfig.from_pretrained(folder), local_path=str(folder),
            trust_remote_code=False, use_liger=False, fused_kernel_options=None, use_fused_kernels=False,
            enable_gradient_checkpointing=True, external_lib=external_lib,
        ),
        engine_config=SimpleNamespace(model_dtype="fp32", forward_only=False, entropy_checkpointing=False),
        use_remove_padding=use_remove_padding, pad_to_length=None, ulysses_sequence_parallel_size=1,
        device_mesh=SimpleNamespace(get_coordinate=lambda: [0]), _autocast_dtype=torch.float32,
    )  # fmt: skip
    torch.manual_seed(0)
    with mock.patch("verl.utils.model.load_valuehead_model", load_token_classifier):
        engine.module = engine._build_module().eval()
    with mock.patch.object(torch.distributed, "get_rank", return_value=0):
        build = impl.FSDPEngine._build_fsdp_module
        shard = getattr(build, "__wrapped__", build)
        with mock.patch.object(impl.FSDPEngine, "_build_fsdp_module", rebuilt(build, shard)):
            engine.module = engine._build_fsdp_module(engine.module)
    return engine


def rebuilt(build, shard):
    """`build`, where what it hands the module on to (`shard`, verl's own, which needs a GPU) hands it back."""
    if build is shard:
        return lambda self, module: module
    return sys.modules[PLUGIN]._wrap(lambda self, module: module)


def batches():
    """Groups of four completions of one prompt, as nested tensors."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        prompt = torch.randint(3, 200, (int(torch.randint(5, 20, (), generator=draw)),), generator=draw)
        lengths = torch.randint(2, 25, (4,), generator=draw).tolist()
        rows = [torch.cat([prompt, torch.randint(3, 200, (n,), generator=draw)]) for n in lengths]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        positions = torch.nested.as_nested_tensor([torch.arange(len(row)) for row in rows], layout=torch.jagged)
        data = TensorDict({"input_ids": nested, "position_ids": positions}, batch_size=4)
        tu.assign_non_tensor(data, use_remove_padding=False, use_fused_kernels=False, temperature=1.0, pad_token_id=0)
        yield data


def train(engine) -> tuple[torch.Tensor, int, int]:
    """Loss of each step, and the tokens of its batches and of those that entered the first layer."""
    entered, padded, losses = [], 0, []
    layer = next(m for m in engine.module.modules() if type(m).__name__ == "Qwen2DecoderLayer")
    layer.register_forward_pre_hook(lambda module, args: entered.append(args[0].shape[:2].numel()))
    engine.module.gradient_checkpointing_disable()
    optimizer = torch.optim.AdamW(engine.module.parameters(), lr=1e-4)
    for data in batches():
        rows = data["input_ids"].unbind()
        padded += len(rows) * max(map(len, rows))

        def loss_function(model_output, data=None, dp_group=None):
            (values,) = (model_output[name] for name in ("log_probs", "values") if name in model_output)
            weights = torch.linspace(-1, 1, values.values().numel())
            return (values.values() * weights).mean(), {}

        step = sys.modules[type(engine).__module__]
        with (
            mock.patch.object(step, "get_device_id", return_value="cpu"),
            mock.patch.object(type(engine), "get_data_parallel_group", return_value=None),
        ):
            loss, _ = engine.forward_step(data, loss_function, forward_only=False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), sum(entered), padded


@pytest.mark.parametrize("sharing", ["0", "1"], ids=["padding-free", "prefix sharing"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_its_engine_are_the_same_with_fewer_tokens(kind, sharing, folder, monkeypatch):
    monkeypatch.setenv("TRL_PADFIX_PREFIX_SHARING", sharing)
    theirs, computed, padded = train(build_engine(folder, kind, None))
    assert computed == padded
    engine = build_engine(folder, kind, PLUGIN)
    ours, entered, _ = train(engine)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    stats = attachment_of(engine.module).stats
    assert entered == stats.packed_tokens < stats.padded_tokens == padded
    assert (stats.packed_tokens < stats.real_tokens) is (sharing == "1")


def test_engines_that_do_not_name_it_are_left_alone(folder):
    build_engine(folder, "actor", PLUGIN)
    assert attachment_of(build_engine(folder, "actor", None).module) is None


def test_its_own_padding_removal_is_refused_beside_it(folder):
    with pytest.raises(PaddingRemovalError, match="Set `use_remove_padding=false`"):
        build_engine(folder, "actor", PLUGIN, use_remove_padding=True)


def test_bad_settings_are_refused_when_it_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    monkeypatch.setenv("TRL_PADFIX_PREFIX_SHARING", "maybe")
    with pytest.raises(ValueError, match="is 0, 1 or auto, got 'maybe'"):
        __import__(PLUGIN)
