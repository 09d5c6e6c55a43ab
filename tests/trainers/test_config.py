"""`DPOConfig`, and what importing the package costs and changes: nothing until a trainer is asked for."""

import dataclasses
import inspect
import json
import pickle
import re
import subprocess
import sys

import pytest
import trl
from kit.methods import make_trainer
from kit.trainer_runs import our_warnings

import trl_padfix
from trl_padfix import DPOConfig
from trl_padfix.trainers.settings import trls_configuration


HAS_DISTILLATION = "DistillationConfig" in trl_padfix.__all__
ON_CPU = {"use_cpu": True, "bf16": False, "report_to": []}


def run_python(code):
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_unknown_field_is_answered_with_the_one_of_today():
    for given, answer in {
        "max_prompt_length": "`DPOConfig` has no field `max_prompt_length` (removed from TRL: shorten the prompts",
        "evaluation_strategy": "`evaluation_strategy` (it is `eval_strategy` now)",
        "generate_during_eval": "(removed from TRL: DPO and SFT have `predict_with_generate` here)",
        "padding_fre": "`padding_fre` (did you mean `padding_free`?).",
        "nonsense": "has no field `nonsense`.",
        "pool_last_token": "`DPOConfig` has no field `pool_last_token` (a field of `RewardConfig`).",
        # Of a configuration that nothing has imported yet.
        "teacher_attn_implementation": "(a field of `DistillationConfig`)" if HAS_DISTILLATION else "has no field",
    }.items():
        with pytest.raises(TypeError, match=re.escape(answer)):
            DPOConfig(**{given: 1}, **ON_CPU)
    assert "nonsense" not in inspect.signature(DPOConfig).parameters
    assert "padding_free" in inspect.signature(DPOConfig).parameters


PARTS = {"text_config": "flash_attention_2", "vision_config": "sdpa"}


@pytest.mark.parametrize("given", ["eager", PARTS, json.dumps(PARTS)])
def test_attention_is_a_name_or_a_mapping_of_parts(given):
    config = DPOConfig(attn_implementation=given, ref_attn_implementation=given, **ON_CPU)
    expected = given if given == "eager" else PARTS
    assert (config.attn_implementation, config.ref_attn_implementation) == (expected, expected)
    for copied in (dataclasses.replace(config, beta=0.2), pickle.loads(pickle.dumps(config))):
        assert (copied.attn_implementation, copied.ref_attn_implementation) == (expected, expected)
    assert config.to_dict()["attn_implementation"] == expected


SHARING = {"padding_free": True, "prefix_sharing": True}


@pytest.mark.parametrize(
    ("library", "fields", "warns"), [(trl, SHARING, True), (trl, {}, False), (trl_padfix, SHARING, False)]
)
def test_a_trainer_that_does_not_know_our_fields_gets_a_warning(library, fields, warns, tmp_path, caplog):
    args = trl_padfix.KTOConfig(str(tmp_path), max_steps=1, save_strategy="no", **fields, **ON_CPU)
    trainer = make_trainer(library, "KTO", tmp_path, args=args)
    trainer.train()
    said = [line for line in our_warnings(caplog) if "got this `KTOConfig`" in line]
    assert len(said) == warns
    assert all("does not know `padding_free`, `prefix_sharing`. Import" in line for line in said)
    assert vars(trls_configuration(args)).keys() == vars(trl.KTOConfig(str(tmp_path), **ON_CPU)).keys()


NOT_NEEDED = {
    "import trl_padfix, trl_padfix.experimental": {
        *("torch", "transformers", "trl", "datasets", "accelerate", "rich", "typer"),
    },
    "from trl_padfix import padding_free_layout": {"transformers", "trl", "datasets", "accelerate"},
    "from trl_padfix import remove_padding, check_parity, PaddingRemovalError": {"trl", "datasets"},
    "from trl_padfix import PaddingRemovalCallback": {"trl"},
}
"""Statements, each of which needs more than those before it, and what none of them imports."""


@pytest.mark.slow
def test_an_import_costs_only_what_it_needs():
    """What is imported after each of these statements, one after another in a fresh interpreter."""
    lines = ["import json, sys", "found = []"]
    for statement in NOT_NEEDED:
        lines += [statement, "found.append([name for name in sys.modules if '.' not in name])"]
    found = json.loads(run_python("\n".join([*lines, "print(json.dumps(found))"])))
    for imported, not_needed in zip(found, NOT_NEEDED.values(), strict=True):
        assert "trl_padfix" in imported
        assert not_needed & {*imported} == set()


@pytest.mark.slow
def test_importing_the_trainers_changes_nothing_elsewhere():
    code = """
import inspect, logging, os, warnings
import torch, transformers, trl
import trl.trainer.dpo_trainer as trl_dpo
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2 import modeling_qwen2


def snapshot():
    classes = [trl.DPOTrainer, trl.DPOConfig, trl_dpo.DataCollatorForPreference, transformers.Trainer,
               transformers.PreTrainedModel, modeling_qwen2.Qwen2Model, modeling_qwen2.Qwen2Attention, torch.nn.Module]
    return [dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS), vars(trl_dpo).copy(),
            [dict(vars(c)) for c in classes], warnings.filters[:], logging.root.handlers[:], logging.root.level,
            dict(os.environ)]


before = snapshot()
import trl_padfix.trainers, trl_padfix.trainers.config, trl_padfix.trainers.data.collators
import trl_padfix.core.parity.check
after = snapshot()
print(*(i for i, (a, b) in enumerate(zip(before, after)) if a != b))
"""
    assert run_python(code) == ""
