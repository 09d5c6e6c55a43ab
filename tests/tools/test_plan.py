"""`trl-padfix plan`: memory by item, checked against what a step on CPU holds, and a training that fits."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from kit.commands import trl_padfix_command
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, MixtralConfig, Qwen2Config, Qwen2ForCausalLM

from trl_padfix.tools.plan import ModelSizes, Training, flags, load_sizes, memory, smallest_fit, splitting_flags


SHAPES = {
    "narrow": dict(hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4,
                   num_key_value_heads=2, vocab_size=300),
    "wide": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=4, vocab_size=1000),
}  # fmt: skip


def held(model, tokens, checkpointing):
    """The most bytes of a training step whose gradients and optimizer states are there already."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens))

    def backward():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

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
    kept = [*model.parameters(), *(p.grad for p in trained), *states]
    return peak + sum(t.numel() * t.element_size() for t in kept)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("lora", "checkpointing"), [(0, False), (0, True), (8, False)])
def test_the_estimate_is_what_a_step_holds(shape, lora, checkpointing):
    config, tokens = Qwen2Config(**SHAPES[shape], attn_implementation="sdpa"), 1500
    how = Training(lora=lora, checkpointing=checkpointing, half=False, head_tokens=0)
    model = Qwen2ForCausalLM(config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM"))
    measured, sizes = held(model, tokens, checkpointing), ModelSizes.of(config)
    estimated = memory(sizes, how)
    assert estimated.total(tokens) == pytest.approx(measured, rel=0.1)
    # The control: a step of other tokens is another one.
    assert estimated.total(tokens // 2) != pytest.approx(measured, rel=0.1)


def test_the_table_of_the_page_is_that_of_the_formulas():
    sizes = ModelSizes(70_600_000_000, 855_000_000, 80, 8192, 28672, 128256, 64, 8, 128, 0)
    found = memory(sizes, Training(gpus=512, sharded=True, checkpointing=True, reference=True))
    assert found.items["weights, gradients, moments"] / 1e9 == pytest.approx(2.2, abs=0.05)
    assert found.items["two gathered layers"] / 1e9 == pytest.approx(3.5, abs=0.1)
    assert found.token / 1e6 == pytest.approx(1.8, abs=0.05)


def test_the_simplest_training_that_fits_is_chosen():
    sizes = ModelSizes.of(Qwen2Config(**SHAPES["wide"]))
    how = {"longest": 1024, "gpus": 8, "reference": True}
    room = smallest_fit(sizes, available=10**10, **how)
    assert (room.training.sharded, room.training.checkpointing) == (False, False)
    assert room.memory.total(room.tokens) <= 10**10
    tight = smallest_fit(sizes, available=room.memory.fixed + 30 * 10**6, **how)
    assert tight.training.sharded
    assert 1024 <= tight.tokens < room.tokens
    with pytest.raises(ValueError, match="Nothing fits: with a row of 1024 tokens"):
        smallest_fit(sizes, available=10**6, **how)


def test_rows_are_split_over_gpus_only_where_one_holds_none():
    sizes = ModelSizes.of(Qwen2Config(**SHAPES["wide"]))
    fits = {"available": 10**8, "gpus": 8}
    most = smallest_fit(sizes, longest=1, **fits)
    assert most.training.split == 1
    longest = most.tokens * 3 // 2
    plan = smallest_fit(sizes, longest=longest, **fits)
    assert (plan.training.sharded, plan.training.checkpointing, plan.training.split) == (True, True, 2)
    assert plan.tokens >= longest
    assert plan.memory.token == pytest.approx(memory(sizes, replace(plan.training, split=1)).token / 2, rel=0.01)
    assert splitting_flags(plan.training).endswith("cp_size 2 --parallelism_config_dp_shard_size 4")
    assert not any("max_tokens_per_batch" in flag for flag in flags(plan, 1))
    with pytest.raises(ValueError, match="Nothing fits"):
        smallest_fit(sizes, longest=longest, may_split=False, **fits)


@pytest.mark.parametrize("config", [GPT2Config(), MixtralConfig(num_hidden_layers=1)])
def test_what_the_formulas_do_not_describe_is_refused(config):
    with pytest.raises(NotImplementedError, match=f"`{config.model_type}` has "):
        ModelSizes.of(config)


def test_the_command_says_what_to_run(tmp_path):
    Qwen2Config(**SHAPES["wide"]).save_pretrained(tmp_path)
    assert load_sizes(str(tmp_path)) == load_sizes(str(tmp_path / "config.json"))
    stats = {"lengths": {"text": {"max": 900.0}}, "batches": [{"batch_size": 4, "distinct": 1600}], "max_length": 512}
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    given = ["--stats", str(tmp_path / "stats.json"), "--accelerate", str(tmp_path / "a.yaml"), "--gpus", "4"]
    result = trl_padfix_command(
        "plan", str(tmp_path), "--memory", "0.5", "--method", "dpo", *given, "--json", str(tmp_path / "plan.json")
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "plan.json").read_text())
    assert f"--max_tokens_per_batch {found['tokens']}" in result.output
    assert "--max_length 512" in result.output
    assert f"holds about {found['tokens'] / 400:,.0f} rows" in result.output
    assert yaml.safe_load((tmp_path / "a.yaml").read_text())["num_processes"] == 4
    result = trl_padfix_command("plan", str(tmp_path), "--memory", "0.1", "--max-length", "100000")
    assert result.exit_code == 2
    assert "Nothing fits" in result.output
