"""`trl-padfix plan`: memory by item, checked against what a step on CPU holds, and a training that fits."""

import json
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import trl
import yaml
from kit.cells import slow_but
from kit.commands import trl_padfix_command
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    FalconH1Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    RwkvConfig,
)

import trl_padfix
from trl_padfix.tools import counted_step
from trl_padfix.tools.counted_step import CountedStep
from trl_padfix.tools.model_sizes import ModelSizes
from trl_padfix.tools.plan import FOUR_BITS, Plan, Training, memory, smallest_fit
from trl_padfix.tools.plan_command import flags, splitting_flags


try:
    import bitsandbytes as bnb
except ImportError:
    bnb = None

NARROW = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2)
WIDE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16)
SHAPES = {
    "narrow": Qwen2Config(**NARROW, vocab_size=300),
    "wide": Qwen2Config(**WIDE, vocab_size=1000),
    "experts": Qwen3MoeConfig(**NARROW, **EXPERTS, vocab_size=300),
}


class FourBitLinear(nn.Linear):
    """A frozen layer in four bits, two weights in a byte and a scale for 64: bitsandbytes' without its kernels."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = nn.Parameter(torch.zeros(layer.weight.numel() // 2, dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.ones(layer.weight.numel() // 64), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x):
        out = Product.apply(x, self)
        return out if self.bias is None else out + self.bias


class Product(torch.autograd.Function):
    @staticmethod
    def weight(layer):
        return torch.ones(layer.out_features, layer.in_features, dtype=torch.bfloat16)

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.bfloat16() @ Product.weight(layer).T

    @staticmethod
    def backward(ctx, grad):
        return grad @ Product.weight(ctx.layer), None


def in_four_bits(layer):
    """The layer as bitsandbytes makes it where that is installed, else as [`FourBitLinear`]."""
    if bnb is None:
        return FourBitLinear(layer)
    made = bnb.nn.Linear4bit(
        layer.in_features, layer.out_features, layer.bias is not None, torch.bfloat16, compress_statistics=False,
        quant_type="nf4",
    )  # fmt: skip
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")


def build(config, how):
    """The model that a training trains, as TRL makes it."""
    config.dtype = torch.bfloat16 if how.lora or how.sharded else torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if how.quantized:
        head = model.get_output_embeddings()
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear and child is not head:
                    setattr(module, name, in_four_bits(child))
    if how.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if how.lora:
        lora = LoraConfig(r=how.lora, target_modules="all-linear", lora_dropout=0, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        for parameter in (p for p in model.parameters() if p.requires_grad and how.quantized):
            parameter.data = parameter.data.bfloat16()
        model.enable_input_require_grads()
    return model.train()


def held(model, tokens, how):
    """The most bytes of a training step whose gradients and optimizer states are there already."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens))

    def backward():
        with torch.autocast("cpu", torch.bfloat16, enabled=not how.sharded):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    backward()
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        backward()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    scales = [m.weight.quant_state.absmax for m in model.modules() if hasattr(getattr(m, "weight", 0), "quant_state")]
    kept = [*model.parameters(), *(p.grad for p in trained), *states, *scales]
    return peak + sum(t.numel() * t.element_size() for t in kept)


WAYS = {
    "all weights": {},
    "checkpointing": {"checkpointing": True},
    "adapters": {"lora": 8},
    "adapters, checkpointing": {"lora": 8, "checkpointing": True},
    "adapters on four bits": {"lora": 8, "quantized": True},
}


FAST = [("experts", "checkpointing")]


@pytest.mark.parametrize(("shape", "way"), slow_but(FAST, product(SHAPES, WAYS)))
def test_the_estimate_is_what_a_step_holds(shape, way, monkeypatch):
    monkeypatch.setattr(counted_step, "DROPOUT", 0)  # whose masks take more on a CPU than on a GPU
    config, tokens = SHAPES[shape], 400
    how = Training(head_tokens=0, **WAYS[way])
    measured, sizes = held(build(config, how), tokens, how), ModelSizes.of(config)
    estimated = memory(sizes, how)
    assert estimated.total(tokens) == pytest.approx(measured, rel=0.1)
    # The control: a step of other tokens is another one.
    assert estimated.total(tokens // 8) != pytest.approx(measured, rel=0.1)


# As their `config.json` has them.
QWEN_7B = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
LLAMA_70B = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=128256, tie_word_embeddings=False,
)  # fmt: skip
QWEN_30B = Qwen3MoeConfig(
    hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
    tie_word_embeddings=False,
)  # fmt: skip


PUBLISHED = {
    "Qwen2.5-7B": (QWEN_7B, 7_615_616_512, 7.6),
    "Llama-3-70B": (LLAMA_70B, 70_553_706_496, 70.6),
    "Qwen3-30B-A3B": (QWEN_30B, 30_532_122_624, 3.3),
}
PAGE = (Path(__file__).parents[2] / "docs/scaling.md").read_text()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name):
    config, published, active = PUBLISHED[name]
    sizes = ModelSizes.of(config)
    assert sizes.parameters == published
    assert sizes.active / 1e9 == pytest.approx(active, rel=0.02)
    assert f"| {name} | {published:,} |" in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_has_the_bytes_of_weights_that_are_planned(name):
    sizes = ModelSizes.of(PUBLISHED[name][0])
    page = re.search(rf"\| {name} \|.*?\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE)
    ways = ({}, {"lora": 16, "checkpointing": True}, {"lora": 16, "quantized": True, "checkpointing": True})
    for way, figure in zip(ways, page.groups(), strict=True):
        items = memory(sizes, Training(**way)).items
        assert (sum(items.values()) - items["scores"]) / 1e9 == pytest.approx(float(figure), abs=0.06)


@pytest.mark.slow
def test_the_table_of_the_page_is_what_is_counted():
    sizes = ModelSizes.of(LLAMA_70B)
    found = {n: memory(sizes, Training(n, sharded=True, checkpointing=True, reference=True)) for n in (64, 512)}
    rows = re.findall(r"^\| (\w+).*? \| ([\d.]+) GB \| ([\d.]+) GB \|$", PAGE, re.MULTILINE)
    names = {"policy": "weights, gradients, moments", "reference": "reference", "two": "gathered layers, LM head"}
    assert [row[0] for row in rows] == list(names)
    for name, *figures in rows:
        planned = [found[n].items[names[name]] / 1e9 for n in (64, 512)]
        assert [float(figure) for figure in figures] == pytest.approx(planned, abs=0.06)
    token = re.search(r"^\| checkpoints and the recomputed layer, per token .* ([\d.]+) MB \|$", PAGE, re.MULTILINE)
    assert found[64].token / 1e6 == pytest.approx(float(token[1]), abs=0.05)


@pytest.fixture
def sizes(monkeypatch):
    """Sizes of a small model; what its steps hold is made up, as a count of one takes seconds."""

    def step(self, how):
        kept, working = (5_000, 20_000) if how.checkpointing else (40_000, 2_000)
        fixed = 2 * self.parameters * how.autocast
        return CountedStep(how.lora * 1_000 or self.parameters, kept, kept / 4, working, fixed)

    monkeypatch.setattr(ModelSizes, "step", step)
    return ModelSizes.of(SHAPES["wide"])


def fit(sizes, *, available, longest, budget=None, may_split=True, **base) -> Plan:
    how = {"available": available, "longest": longest, "budget": budget, "may_split": may_split}
    return smallest_fit(sizes, Training(**base), **how)


def test_the_simplest_training_that_fits_is_chosen(sizes):
    how = {"longest": 1024, "gpus": 8, "reference": True}
    room = fit(sizes, available=10**10, **how)
    assert (room.training.sharded, room.training.checkpointing) == (False, False)
    assert room.memory.total(room.tokens) <= 10**10
    tight = fit(sizes, available=room.memory.fixed + 10**7, **how)
    assert tight.training.sharded
    assert 1024 <= tight.tokens < room.tokens


def test_where_nothing_fits_it_says_what_would(sizes):
    how = {
        "longest": 1024,
        "gpus": 2,
        "reference": True,
        "may_split": False,
        "head_tokens": 64,
        "available": 4 * 10**7,
    }
    with pytest.raises(ValueError, match="Nothing fits: with 1024 tokens") as error:
        fit(sizes, **how)
    enough = int(re.search(r"(\d+) GPUs of this size \(`--gpus \1`\)", str(error.value))[1])
    assert fit(sizes, **how | {"gpus": enough}).tokens >= 1024
    with pytest.raises(ValueError, match="Nothing fits"):
        fit(sizes, **how | {"gpus": enough // 2})
    assert "adapters (`--lora 16`)" in str(error.value)
    assert fit(sizes, **how | {"lora": 16, "reference": False}).tokens >= 1024
    shorter = int(re.search(r"at most (\d+) tokens", str(error.value))[1])
    assert fit(sizes, **how | {"longest": shorter}).tokens == shorter
    with pytest.raises(ValueError, match="What would do: larger GPUs"):
        fit(sizes, **how | {"available": 10**5})


def test_a_budget_that_is_given_is_planned_for(sizes):
    how = {"longest": 512, "gpus": 1, "available": 10**9}
    small, large = (fit(sizes, budget=budget, **how) for budget in (512, 25_000))
    assert (small.tokens, large.tokens) == (512, 25_000)
    assert (small.training.checkpointing, large.training.checkpointing) == (False, True)
    assert "--max_tokens_per_batch 512" in flags(small, 512)
    with pytest.raises(ValueError, match="Nothing fits: with 2000000 tokens"):
        fit(sizes, budget=2_000_000, **how)
    with pytest.raises(ValueError, match="A budget of 256 tokens does not hold 512"):
        fit(sizes, budget=256, **how)


def test_rows_are_split_over_gpus_only_where_one_holds_none(sizes):
    fits = {"available": 10**8, "gpus": 8}
    most = fit(sizes, longest=1, **fits)
    assert most.training.split == 1
    longest = most.tokens * 3 // 2
    plan = fit(sizes, longest=longest, **fits)
    assert (plan.training.sharded, plan.training.checkpointing, plan.training.split) == (True, True, 2)
    assert plan.tokens >= longest
    assert plan.memory.token == pytest.approx(memory(sizes, replace(plan.training, split=1)).token / 2, rel=0.01)
    assert splitting_flags(plan.training).endswith("cp_size 2 --parallelism_config_dp_shard_size 4")
    assert f"--max_tokens_per_batch {plan.tokens}" in flags(plan, longest)  # of the GPUs that share rows
    with pytest.raises(ValueError, match="Nothing fits"):
        fit(sizes, longest=longest, may_split=False, **fits)


def test_checkpoints_wait_on_the_host_only_where_nothing_else_helps(sizes):
    fits = {"available": 10**8, "gpus": 8}
    kept = memory(sizes, Training(8, True, True, split=sizes.config.num_attention_heads))
    most = int(0.92 * 10**8 - kept.fixed) // kept.token // 256 * 256  # tokens, in steps of 256
    assert not fit(sizes, longest=most, **fits).training.offload
    plan = fit(sizes, longest=most + 1, **fits)
    assert plan.training.offload
    assert plan.tokens > most
    assert """--activation_checkpointing_kwargs '{"offload": true}'""" in flags(plan, 8)


def test_experts_of_other_gpus_are_not_gathered(sizes):
    sizes = ModelSizes.of(SHAPES["experts"])
    layer = 3 * NARROW["hidden_size"] * EXPERTS["moe_intermediate_size"] * EXPERTS["num_experts"]
    whole, shared = (memory(sizes, Training(8, True, expert_parallel=n)) for n in (1, 4))
    assert sizes.layer_experts == (layer,) * NARROW["num_hidden_layers"]
    assert whole.fixed - shared.fixed == 2 * 2 * layer * 3 // 4  # of two layers, in bfloat16
    assert shared.token - whole.token == 2 * 2 * NARROW["hidden_size"] * EXPERTS["num_experts_per_tok"]
    assert "exchanged" not in whole.per_token
    plan = fit(sizes, gpus=8, available=10**9, longest=64, expert_parallel=4)
    assert plan.training == Training(8, True, expert_parallel=4)
    control = fit(sizes, gpus=8, available=10**9, longest=64)
    assert not control.training.sharded


@pytest.mark.parametrize(
    ("shape", "flags", "says"),
    [
        (
            "experts",
            "--gpus 8 --expert-parallel 3",
            "3 GPUs share the experts of a layer evenly, and there are 8 GPUs",
        ),
        ("experts", "--gpus 32 --expert-parallel 16", "evenly, and there are 8 experts of a layer"),
        ("wide", "--gpus 8 --expert-parallel 2", "there are no experts"),
        ("wide", "--gpus 3 --tensor-parallel 3", "3 GPUs share a layer evenly, and `num_attention_heads` is"),
        ("wide", "--gpus 3 --tensor-parallel 2", "2 GPUs share each layer, and do not divide 3 GPUs"),
        ("wide", "--gpus 2 --tensor-parallel 2 --lora 8", "was not counted with --expert-parallel and --lora"),
    ],
)
@pytest.mark.usefixtures("sizes")
def test_what_gpus_cannot_share_is_a_message(shape, flags, says, tmp_path):
    SHAPES[shape].save_pretrained(tmp_path)
    result = trl_padfix_command("plan", str(tmp_path), *flags.split())
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize(
    ("shape", "flag", "sizes_of", "more"),
    [
        ("experts", "--expert-parallel", {"fsdp_size": 4, "ep_size": 2}, {}),
        ("wide", "--tensor-parallel", {"fsdp_size": 2, "tp_size": 2}, {"tp_plan": "auto"}),
    ],
)
@pytest.mark.usefixtures("sizes")
def test_the_command_shards_as_planned(shape, flag, sizes_of, more, tmp_path):
    SHAPES[shape].save_pretrained(tmp_path)
    result = trl_padfix_command("plan", str(tmp_path), "--gpus", "4", flag, "2", "--max-length", "64")
    assert result.exit_code == 0, result.output
    _, config, _ = parsed(result.output, "sft")
    assert config.model_init_kwargs == {"distributed_config": sizes_of | more | {"fsdp_mixed_precision": True}}
    assert config.save_only_model
    if flag == "--tensor-parallel":  # the GPUs of a group have one batch
        assert config.max_tokens_per_batch is None
        assert config.per_device_train_batch_size > 1
    launch = yaml.safe_load(result.output.partition("accelerate.yaml:")[2])
    assert (launch["distributed_type"], launch["num_processes"]) == ("MULTI_GPU", 4)


@pytest.mark.slow
def test_a_layer_of_several_gpus_has_its_share_of_heads_and_mlps():
    """Weights by the model's own plan, activations of a model that is as narrow; each has all tokens' states."""
    whole = ModelSizes.of(SHAPES["wide"])
    one = whole.of_one(2)
    norms = sum(
        p.numel() for name, p in AutoModelForCausalLM.from_config(SHAPES["wide"]).named_parameters() if "norm" in name
    )
    assert one.parameters == (whole.parameters + norms) // 2
    alone, shared = memory(whole, Training()), memory(one, Training(2, tensor_parallel=2))
    assert shared.items["weights, gradients, moments"] == 16 * one.parameters
    assert 0.5 * alone.token < shared.token < 0.9 * alone.token
    experts = ModelSizes.of(SHAPES["experts"])
    assert experts.of_one(2).layer_experts[0] == experts.layer_experts[0] // 2
    plan = fit(one, gpus=4, available=10**9, longest=64, tensor_parallel=2)
    assert plan.training == Training(4, True, tensor_parallel=2)


def test_a_layer_that_no_plan_shards_is_refused(monkeypatch):
    sizes = ModelSizes.of(SHAPES["wide"])
    monkeypatch.setattr(Qwen2Config, "base_model_tp_plan", {})
    with pytest.raises(NotImplementedError, match=r"`tp_plan` of `qwen2` leaves .* values of `model.layers.0"):
        sizes.of_one(2)


@pytest.mark.slow
def test_a_million_tokens_take_the_memory_that_was_published():
    """
    TRL's guide to long contexts: Qwen3-8B, one row of 1,048,576 tokens on 8 GPUs, all weights, checkpoints on the
    host, chunks of 256 tokens in the loss: 56.2 GB of each.
    """
    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    sizes = ModelSizes.of(config)
    assert sizes.parameters == 8_190_735_360  # as published
    training = Training(8, True, True, head_tokens=256, split=8, offload=True)
    offloaded, kept = (memory(sizes, t).total(2**20) / 1e9 for t in (training, replace(training, offload=False)))
    assert offloaded == pytest.approx(56.2, rel=0.05)
    assert kept > 80  # more than such a GPU has


@pytest.mark.usefixtures("sizes")
def test_four_bits_are_those_of_the_linear_layers():
    dense, experts = ModelSizes.of(SHAPES["wide"]), ModelSizes.of(SHAPES["experts"])
    for sizes in (dense, experts):
        plain, quantized = (
            memory(sizes, Training(lora=8, quantized=q)).items["frozen weights"] for q in (False, True)
        )
        assert plain == 2 * sizes.parameters
        assert plain - quantized == pytest.approx((2 - FOUR_BITS) * sizes.linear_weights, abs=2)
    assert dense.linear_weights > 0.7 * dense.parameters
    assert experts.linear_weights < 0.5 * experts.parameters  # stacked experts are no linear layers


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (FalconH1Config(num_hidden_layers=2), "'FalconH1Mixer'"),
        (RwkvConfig(num_hidden_layers=2), "'RwkvFeedForward', 'RwkvSelfAttention'"),
    ],
)
def test_layers_whose_kernels_are_not_known_are_refused_with_what_runs(config, kinds):
    with pytest.raises(NotImplementedError, match=rf"has \[{kinds}\].*`trl-padfix bench .*`") as error:
        ModelSizes.of(config)
    command = shlex.split(re.search(r"`trl-padfix (bench .*?)`", str(error.value))[1])
    result = trl_padfix_command(*command, "--help")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BertConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2), "A step of `bert`"),
        (Qwen2Config(vocab_size=-1, hidden_size=64), "negative dimension"),
    ],
)
def test_a_model_that_cannot_be_counted_is_a_message(config, said, tmp_path, caplog):
    config.save_pretrained(tmp_path)
    result = trl_padfix_command("plan", str(tmp_path))
    assert result.exit_code == 2, result.exception
    assert "Invalid value for MODEL" in result.output
    assert said in result.output
    assert "Traceback" not in result.output + caplog.text


def parsed(output, method):
    """The command that was printed, as `trl-padfix` reads it."""
    command = output[output.index("-m trl_padfix") :].split("\n\n")[0].replace("\\\n", " ")
    config = {"dpo": trl_padfix.DPOConfig, "sft": trl_padfix.SFTConfig, "grpo": trl_padfix.GRPOConfig}[method]
    parser = trl.TrlParser((trl.ScriptArguments, config, trl.ModelConfig))
    given = [*shlex.split(command)[3:], "--output_dir", "out", "--use_cpu", "--bf16", "false"]
    return parser.parse_args_and_config(given)


@pytest.mark.usefixtures("sizes")
def test_the_command_says_what_to_run(tmp_path):
    SHAPES["wide"].save_pretrained(tmp_path)
    stats = {"lengths": {"text": {"max": 900.0}}, "batches": [{"batch_size": 4, "distinct": 1600}], "max_length": 512}
    (tmp_path / "stats.json").write_text(json.dumps(stats | {"data": "some/data"}))
    given = ["--stats", str(tmp_path / "stats.json"), "--accelerate", str(tmp_path / "a.yaml"), "--gpus", "4"]
    given += ["--json", str(tmp_path / "plan.json"), "--memory", "0.5", "--method", "dpo"]
    result = trl_padfix_command("plan", str(tmp_path / "config.json"), *given)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["model"] == str(tmp_path)  # not the file
    script, config, model = parsed(result.output, "dpo")
    assert (config.max_tokens_per_batch, config.max_length) == (found["tokens"], 512)
    assert (script.dataset_name, model.model_name_or_path) == ("some/data", str(tmp_path))
    assert f"holds about {found['tokens'] / 400:,.0f} rows" in result.output
    assert yaml.safe_load((tmp_path / "a.yaml").read_text())["num_processes"] == 4
    result = trl_padfix_command("plan", str(tmp_path), "--memory", "0.1", "--max-length", "100000")
    assert result.exit_code == 2
    assert "Nothing fits" in result.output


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("two words", "--dataset_name 'two words'"),
        ("dpo.yaml", "--config dpo.yaml"),
        ("config.json", "--dataset_name DATA"),
    ],
)
@pytest.mark.usefixtures("sizes")
def test_data_is_named_as_a_training_takes_it(data, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SHAPES["wide"].save_pretrained(tmp_path)
    stats = {"lengths": {"text": {"max": 90}}, "batches": [], "data": data}
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    result = trl_padfix_command("plan", ".", "--stats", "stats.json")
    assert said in result.output
    assert ("DATA stands for a folder" in result.output) == said.endswith("DATA")


@pytest.mark.parametrize(
    ("method", "more"), [("sft", ["--lora", "8", "--load-in-4bit"]), ("grpo", ["--max-tokens-per-batch", "2000"])]
)
@pytest.mark.usefixtures("sizes")
def test_what_it_prints_is_read_as_it_is_meant(method, more, tmp_path):
    SHAPES["experts"].save_pretrained(tmp_path)
    result = trl_padfix_command("plan", str(tmp_path), "--memory", "2", "--method", method, *more)
    assert result.exit_code == 0, result.output
    _, config, model = parsed(result.output, method)
    assert "for a token)" in result.output
    if method == "sft":
        assert (model.load_in_4bit, model.lora_r, model.dtype) == (True, 8, "bfloat16")
        assert "and no stacked experts" in " ".join(result.output.split())
    else:
        assert config.max_tokens_per_batch == 2000
    result = trl_padfix_command("plan", str(tmp_path), "--load-in-4bit")
    assert result.exit_code == 2
