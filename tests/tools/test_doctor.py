"""`trl-padfix doctor`, as a user runs it: the text on the terminal and the exit status."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from kit.commands import trl_padfix_command
from transformers import Qwen2VLConfig, XLNetConfig, XLNetLMHeadModel
from zoo.models import CONFIGS

import trl_padfix
from trl_padfix import remove_padding, versions
from trl_padfix.core.attention.availability import ATTENTIONS, Machine
from trl_padfix.tools.doctor import diagnose


doctor = partial(trl_padfix_command, "doctor")


def words(text: str) -> str:
    return " ".join(text.split())


needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")


# This machine


@needs_cpu
def test_the_verdict_comes_first_and_all_fits_a_terminal():
    result = doctor()
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "READY. Padding can be removed here, with `sdpa` attention."
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    output = words(result.output)
    for name in ATTENTIONS:
        assert name in output  # never cut
    assert "cannot run flash_attention_2, flash_attention_3, flash_attention_4: it needs a CUDA GPU" in output
    assert "runs sdpa, eager" in output
    assert "pip install" not in output  # nothing that could not run here
    for package in ("torch", "transformers", "trl"):
        assert f"{package} {versions.installed_version(package)}" in output
    assert f"trl-padfix {trl_padfix.__version__}" in output
    assert "are a pair that is tested together" in output


def test_only_what_this_machine_can_run_is_suggested(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **kwargs: True)
    monkeypatch.setattr("trl_padfix.tools.doctor.Machine.of", lambda: Machine("cuda", (8, 0)))
    output = words(doctor().output)
    for part in ("compute capability 8.0", "attention in bfloat16"):
        assert part in output
    for name in ("flash_attention_2", "flash_attention_3"):
        assert f"cannot run {name}: `import flash_attn" in output
    assert "to install it: `pip install flash-attn --no-build-isolation`" in output
    assert "flash-attn-4" not in output.partition("packed attention")[2]


def test_a_pair_that_is_not_tested_is_said_and_one_out_of_bounds_fails(monkeypatch):
    name = "trl_padfix.versions.installed_version"
    monkeypatch.setattr(name, {"trl": "1.10.99", "transformers": "5.1.0"}.get)
    result = doctor()
    assert result.exit_code == 0
    assert "are not a pair that is tested together; tested: 4.52.4 with 0.17.0" in words(result.output)
    # The oldest pair is for `remove_padding` alone, without the trainers.
    monkeypatch.setattr(name, {"trl": "0.17.0", "transformers": "4.52.4"}.get)
    assert doctor().exit_code == 0
    monkeypatch.setattr(name, {"transformers": "5.24.0"}.get)
    assert "stack no TRL: `remove_padding` and the callback run, no trainer" in words(doctor().output)
    data = Path(__file__).parents[2] / "recipes/data/preferences/train.jsonl"
    result = trl_padfix_command("stats", str(data), "--train-tokenizer", "300")
    assert "trl_padfix.tools.stats` needs trl <2,>=1.10, and none is installed" in result.output
    monkeypatch.setattr(name, {"trl": "0.9.0"}.get)
    result = doctor()
    assert result.exit_code == 1
    assert result.output.startswith("NOT READY.")
    assert "trl 0.9.0: the trainers of this package need trl" in words(result.output)
    assert versions.INSTEAD in words(result.output)
    assert "transformers is not installed: the trainers" in words(result.output)


@needs_cpu
def test_json_has_what_runs():
    found = json.loads(doctor("--json").stdout)
    assert (found["versions"]["torch"], found["auto"]) == (versions.installed_version("torch"), "sdpa")
    assert found["attention"]["flash_attention_2"]
    assert not found["problems"]


# A model


def test_a_model_is_judged_by_its_configuration_alone(tmp_path):
    config = CONFIGS["qwen2"]()
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    result = doctor("--model", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.output.startswith("READY. Qwen2ForCausalLM: padding is removed exactly, with `sdpa` attention.")
    assert f"{tmp_path}: Qwen2ForCausalLM (qwen2)" in words(result.output)
    assert "model.layers" not in result.output
    assert "layers layers.0.self_attn and 2 more (Qwen2Attention): direct" in words(result.output)
    assert "images" not in result.output
    assert len(result.output.splitlines()) <= 25


def test_a_model_that_is_refused_names_the_rule(tmp_path):
    XLNetConfig(n_layer=2, architectures=["XLNetLMHeadModel"]).save_pretrained(tmp_path)
    result = doctor("--model", str(tmp_path))
    assert result.exit_code == 1
    refused = "Padding cannot be removed from XLNetLMHeadModel: we found no layer that mixes tokens in XLNetModel"
    assert refused in words(result.output)
    with pytest.raises(trl_padfix.PaddingRemovalError) as error:
        remove_padding(XLNetLMHeadModel(XLNetConfig(n_layer=1, vocab_size=40, d_model=16, n_head=2, d_inner=16)))
    assert diagnose(str(tmp_path)).model.refusal in str(error.value)


def test_text_and_images_are_told_apart(tmp_path):
    Qwen2VLConfig(architectures=["Qwen2VLForConditionalGeneration"]).save_pretrained(tmp_path)
    output = words(doctor("--model", str(tmp_path)).output)
    assert "text packed" in output
    assert "images packed" in output


def test_a_model_that_cannot_be_read_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model in ("/nowhere/at/all", "no-such/model"):
        result = doctor("--model", model)
        assert result.exit_code == 1
        assert f"--model: there is no file or folder '{model}'" in words(result.output)
