"""`DPOConfig`, and what importing the package costs and changes: nothing until a trainer is asked for."""

import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
import trl
from kit.cells import slow_but
from trl import TrlParser

import trl_padfix
from trl_padfix import DPOConfig
from trl_padfix.trainers.field_types import help_from_docstring, parse_implementation
from trl_padfix.trainers.settings import NEEDS_PADDING_FREE


ON_CPU = {"use_cpu": True, "bf16": False, "report_to": []}
OURS = {
    "padding_free": False,
    "prefix_sharing": False,
    "padding_side": None,
    "parity_check": True,
    "strict": False,
    "packed_multiple_of": None,
    "predict_with_generate": False,
    "generation_max_new_tokens": 256,
    "generation_kwargs": None,
    "eval_generation_samples": None,
    "max_tokens_per_batch": None,
    "group_by_prefix": False,
    "group_by_prefix_buffer": None,
    "exact_eval_means": False,
}


def parse(*flags):
    (config,) = TrlParser((DPOConfig,)).parse_args_and_config([*flags, "--use_cpu", "--bf16", "false"])
    return config


def run_python(code):
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_defaults_change_nothing():
    config = DPOConfig(**ON_CPU)
    assert {name: getattr(config, name) for name in OURS} == OURS


@pytest.mark.parametrize("side", ["middle", "LEFT", "", 1])
def test_another_padding_side_is_an_error(side):
    with pytest.raises(ValueError, match=f"`padding_side` must be 'left', 'right' or None .* got {side!r}"):
        DPOConfig(padding_side=side, **ON_CPU)


PACKED_ONLY = {"prefix_sharing": True, "packed_multiple_of": 64}
PACKED_ONLY |= {"max_tokens_per_batch": 4096, "pool_last_token": True}


@pytest.mark.parametrize("name", NEEDS_PADDING_FREE)
def test_a_field_of_packed_rows_needs_padding_free(name):
    given = {name: PACKED_ONLY[name]}
    with pytest.raises(ValueError, match=rf"`{name}=\w+` needs `padding_free=True`: .* Set both, or neither\.$"):
        trl_padfix.RewardConfig(**given, **ON_CPU)
    trl_padfix.RewardConfig(**given, padding_free=True, **ON_CPU)


def test_sharing_may_be_left_to_the_counts(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("padding_free: true\nprefix_sharing: auto\n")
    configs = [
        DPOConfig(padding_free=True, prefix_sharing="auto", **ON_CPU),
        parse("--padding_free", "--prefix_sharing", "auto"),
        parse("--config", str(path)),
    ]
    assert [config.prefix_sharing for config in configs] == ["auto"] * 3
    assert parse("--padding_free", "--prefix_sharing", "false").prefix_sharing is False
    for value in ("always", None, 1):
        with pytest.raises(ValueError, match=f"True, False or 'auto', got {value!r}"):
            DPOConfig(padding_free=True, prefix_sharing=value, **ON_CPU)


def test_the_parity_check_may_leave_gradients_out(tmp_path):
    assert DPOConfig(parity_check="forward", **ON_CPU).parity_check == "forward"
    assert DPOConfig(parity_check="short", **ON_CPU).parity_check == "short"
    found = [parse("--parity_check", *value).parity_check for value in (["Forward"], ["true"], ["false"], [])]
    assert found == ["forward", True, False, True]
    for value in ("backward", "false", None, 1):
        with pytest.raises(ValueError, match=f"`parity_check` is True, False, 'forward' .* got {value!r}"):
            DPOConfig(parity_check=value, **ON_CPU)


def test_trls_own_checks_still_run():
    with pytest.raises(ValueError, match="loss_weights"):
        DPOConfig(loss_weights=[1.0, 2.0], **ON_CPU)


def test_flags_are_parsed():
    given = ["--padding_free", "--prefix_sharing", "--padding_side", "left", "--parity_check", "false"]
    config = parse(*given, "--max_tokens_per_batch", "4096")
    expected = {"padding_free": True, "prefix_sharing": True, "padding_side": "left", "parity_check": False}
    expected["max_tokens_per_batch"] = 4096
    assert {name: getattr(config, name) for name in OURS} == OURS | expected


def test_yaml_is_parsed_and_flags_go_before_it(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("padding_free: true\nprefix_sharing: true\npadding_side: left\nparity_check: false\nbeta: 0.2\n")
    config = parse("--config", str(path), "--padding_side", "right")
    assert (config.padding_free, config.prefix_sharing, config.parity_check) == (True, True, False)
    assert (config.padding_side, config.beta) == ("right", 0.2)


PARTS = {"text_config": "flash_attention_2", "vision_config": "sdpa"}


@pytest.mark.parametrize("given", ["eager", PARTS, json.dumps(PARTS)])
def test_attention_is_a_name_or_a_mapping_of_parts(given):
    config = DPOConfig(attn_implementation=given, ref_attn_implementation=given, **ON_CPU)
    expected = given if given == "eager" else PARTS
    assert (config.attn_implementation, config.ref_attn_implementation) == (expected, expected)
    for copied in (dataclasses.replace(config, beta=0.2), pickle.loads(pickle.dumps(config))):
        assert (copied.attn_implementation, copied.ref_attn_implementation) == (expected, expected)
    assert config.to_dict()["attn_implementation"] == expected


@pytest.mark.parametrize("name", ["attn_implementation", "ref_attn_implementation"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [(3, TypeError, "a name, or a mapping"), ({"a": 1}, TypeError, "got {'a': 1}"), ("{a", ValueError, "no JSON")],
)
def test_another_attention_is_an_error(name, value, error, message):
    with pytest.raises(error, match=message):
        DPOConfig(**{name: value}, **ON_CPU)


@pytest.mark.parametrize("source", ["flags", "yaml"])
def test_attention_is_parsed_beside_trls_model_config(source, tmp_path):
    # The policy's flag is `ModelConfig`'s, which every script of TRL's parses together with the configuration.
    flags = ["--attn_implementation", json.dumps(PARTS), "--ref_attn_implementation", "eager"]
    path = tmp_path / "config.yaml"
    path.write_text(
        "attn_implementation: {text_config: flash_attention_2, vision_config: sdpa}\nref_attn_implementation: eager\n"
    )
    parser = TrlParser((DPOConfig, trl.ModelConfig))
    given = flags if source == "flags" else ["--config", str(path)]
    config, model_config = parser.parse_args_and_config([*given, "--use_cpu", "--bf16", "false"])
    assert config.attn_implementation is None
    config.attn_implementation = model_config.attn_implementation
    assert parse_implementation(config.attn_implementation) == PARTS
    assert config.ref_attn_implementation == "eager"


def test_every_field_of_ours_has_a_help_text(capsys):
    with pytest.raises(SystemExit) as done:
        parse("--help")
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Compute no padding: the decoder's inputs are packed into one row of real tokens" in text
    assert "Needs `padding_free`" in text
    assert "--padding_side {left,right}" in text
    assert "on a few rows of the first training" in text
    methods = ["DPO", "SFT", "Reward", "KTO", "GRPO", "RLOO"]
    for method in [*methods, *(["Distillation"] if hasattr(trl, "DistillationConfig") else [])]:
        ours, theirs = (dataclasses.fields(getattr(package, f"{method}Config")) for package in (trl_padfix, trl))
        added = {field.name: field.metadata.get("help") for field in ours}.items() - {
            field.name: field.metadata.get("help") for field in theirs
        }.items()
        assert len(dict(added)) > 5
        assert all(dict(added).values())


def test_a_field_is_described_in_its_docstring_only():
    @help_from_docstring
    @dataclasses.dataclass
    class Config:
        """
        Two fields.

        Args:
            side (`str`, *optional*):
                Which side;
                two lines.
            told (`int`, *optional*):
                Not this.
            size, more:
                As elsewhere.

        Example:
            size (`int`): None.
        """

        side: str = "left"
        told: int = dataclasses.field(default=1, metadata={"help": "This."})
        size: int = dataclasses.field(default=1, metadata={"nargs": "?"})

    assert [dict(field.metadata) for field in dataclasses.fields(Config)] == [
        {"help": "Which side; two lines."},
        {"help": "This."},
        {"nargs": "?"},
    ]


PLACES = {"tokenizer": "Write `processing_class=tokenizer`", "beta": "It is a field of `DPOConfig`"}


@pytest.mark.parametrize(("name", "place"), PLACES.items())
def test_an_unknown_argument_of_a_trainer_is_named_with_its_place(name, place):
    args = trl_padfix.DPOConfig(**ON_CPU)
    for trainer in (trl_padfix.DPOTrainer, trl_padfix.SFTTrainer, trl_padfix.GRPOTrainer):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'. {place}"):
            trainer("model", args=args, **{name: None})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zebra'$"):
        trl_padfix.DPOTrainer("model", args=args, zebra=1)


def test_a_configuration_survives_to_dict():
    given = {"padding_free": True, "prefix_sharing": True, "padding_side": "left", "parity_check": False}
    saved = DPOConfig(**given, **ON_CPU).to_dict()
    assert {name: saved[name] for name in given} == given
    assert DPOConfig(**{name: saved[name] for name in [*given, *ON_CPU, "beta", "max_length"]}).to_dict() == saved


NOT_NEEDED = {
    "import trl_padfix, trl_padfix.experimental": {
        *("torch", "transformers", "trl", "datasets", "accelerate", "rich", "typer"),
    },
    "from trl_padfix import padding_free_layout": {"transformers", "trl", "datasets", "accelerate"},
    "from trl_padfix import remove_padding, check_parity, PaddingRemovalError": {"trl", "datasets"},
}
"""Statements, each of which needs more than those before it, and what none of them imports."""


@pytest.fixture(scope="module")
def imported_by():
    """What is imported after each of these statements, one after another in a fresh interpreter."""
    lines = ["import json, sys", "found = []"]
    for statement in NOT_NEEDED:
        lines += [statement, "found.append([name for name in sys.modules if '.' not in name])"]
    found = json.loads(run_python("\n".join([*lines, "print(json.dumps(found))"])))
    return dict(zip(NOT_NEEDED, map(set, found), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("statement", NOT_NEEDED)
def test_an_import_costs_only_what_it_needs(statement, imported_by):
    assert "trl_padfix" in imported_by[statement]
    assert imported_by[statement] & NOT_NEEDED[statement] == set()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("names", slow_but(["DPOTrainer"], ["DPOTrainer", "SFTTrainer", "GRPOTrainer"]))
def test_a_trainer_is_imported_with_no_package_that_trls_does_not_import(names):
    """Modules are counted, not seconds."""
    code = f"from {{}} import {names}\nimport sys; print(*sorted(sys.modules))"
    theirs, ours = (set(run_python(code.format(package)).split()) for package in ("trl", "trl_padfix"))
    more = {module for module in ours - theirs if not module.startswith("trl_padfix.")} - {"trl_padfix"}
    assert {module.partition(".")[0] for module in more} <= {"trl", "transformers", "packaging", "rich"}
    assert not any(module.startswith("trl.scripts") for module in more)
    assert len(more) < 40
    assert len(ours - theirs - more) > 30  # it is ours that was imported


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
