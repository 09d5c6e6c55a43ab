"""
What every method has in common: TRL's trajectory, generation included, whatever the mode, and what is refused.

The losses and set-ups of DPO have a folder of their own; here are those of the older versions that `nox` runs.
"""

import ast
import logging
from itertools import product
from pathlib import Path

import pytest
import torch
import trl
from kit.cells import MATRIX, every_second, once_each, slow_but
from kit.methods import LOSSES, METHODS, PACKED, SIDED_MODES, TWO_MODES, assert_trls
from kit.rows import build_pairs
from kit.sft_cases import NEWEST, OBJECTIVES
from kit.trainer_runs import MODES, SPECIAL, Run, assert_mode_ran, assert_same, break_mode, build_model, our_warnings
from simulated_gpu.flash_stand_in import flash_attention_stand_in

import trl_padfix
from trl_padfix import PaddingRemovalError, ParityError, prefix_sharing_layout


LATER = pytest.mark.skipif(not NEWEST, reason="tried with later versions of TRL")
KINDS = pytest.mark.parametrize("name", METHODS)
KINDS_AND_MODES = pytest.mark.parametrize(("name", "mode"), once_each(METHODS, PACKED))


def cells(*names: str) -> list[str]:
    """Those methods that the installed TRL admits."""
    return [name for name in names if name in METHODS]


@pytest.fixture
def make(name, makers):
    return makers(name)


def each_mode(names: list[str], fast: list[str]) -> list:
    return slow_but(
        [(n, mode) for n in names for mode in fast], [(n, mode) for n in names for mode in METHODS[n].modes]
    )


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *each_mode(cells("SFT", "DPO", "Reward", "KTO"), ["padded, left", *TWO_MODES]),
        *each_mode(cells("GRPO", "RLOO"), ["padded", *PACKED]),
        *each_mode(cells("Distillation"), ["prefix sharing"]),
    ],
)
def test_a_run_and_an_evaluation_are_trls(name, mode, make):
    method = make.method
    ours, theirs = make.train(method.plain, **method.modes[mode]), make.theirs(method.plain)
    assert len(ours.trajectory()) == ours.trainer.args.max_steps + 1 > 5
    assert ours.completions == theirs.completions
    assert_same(ours.trajectory(*method.metrics), theirs.trajectory(*method.metrics))
    if name == "Distillation":
        assert_same(ours.weights(), theirs.weights(), atol=1e-5)
    assert_mode_ran(ours, mode)
    if name == "KTO":
        assert ours.trajectory("kl")[:, 2].max() > 0.1  # the term of the mismatched completions counts
    if method.side:
        left = mode.endswith("left")
        assert any(not mask[:, 0 if left else -1].all() for _, mask in ours.batches)
        assert all(mask[:, -1 if left else 0].all() for _, mask in ours.batches)
        counts = ours.counts()
        expected = [counts[name] for name in ("padded", "padding-free", mode.split(",")[0])]
        for handle in ours.trainer.padding.handles:  # of policy and reference
            stats = handle.stats
            assert [stats.padded_tokens, stats.real_tokens, stats.packed_tokens] == expected
    else:
        assert len({len(c) for c in ours.completions}) > 4


SET_UPS = [
    cell
    for name in cells("SFT", "Reward", "KTO", "GRPO")
    for cell in once_each([(name, case) for case in METHODS[name].set_ups], METHODS[name].packed_modes)
]
# Of RLOO what is not GRPO's code, too.
RLOO = [("RLOO", "two iterations", "padding-free"), ("RLOO", "normalised advantages", "prefix sharing")]
SET_UPS += slow_but(RLOO, [("RLOO", case, mode) for case in METHODS["RLOO"].set_ups for mode in PACKED])
SET_UPS += slow_but(
    [],
    [
        (n, case, mode)
        for n in cells("DPO", "Distillation")
        for case in METHODS[n].set_ups
        for mode in METHODS[n].packed_modes
    ],
)


@pytest.mark.parametrize(("name", "case", "mode"), every_second(SET_UPS))
def test_every_set_up_is_trls(name, case, mode, make):
    ours = assert_trls(make, case, mode)
    if not make.method.side:
        assert ours.entered < make.theirs(case).entered


@pytest.mark.parametrize(
    ("name", "objective", "mode"), once_each([("SFT", objective) for objective in OBJECTIVES], list(SIDED_MODES))
)
def test_every_objective_is_trls(name, objective, mode, make):
    assert_trls(make, objective, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss", "mode"), once_each([("GRPO", loss) for loss in LOSSES], PACKED))
def test_every_loss_is_trls(name, loss, mode, make):
    assert_trls(make, loss, mode)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("GRPO", case) for case in ("accumulation", "two steps of a generation", "two generations of a step")),
        pytest.param("RLOO", "accumulation", marks=MATRIX),
    ],
)
def test_accumulation_does_not_scatter_a_group(name, case, make):
    ours = make.train(case, **MODES["prefix sharing"])
    assert ours.entered < make.theirs(case).counts()["prefix sharing"]


# Without `padding_free` it is that of any mode, by `test_base_import_alone.py` to the bit.
@pytest.mark.parametrize("name", slow_but(cells("SFT", "DPO"), METHODS))
def test_a_configuration_of_trls_is_taken_as_it_is(name, make, tmp_path):
    padding_free = {"padding_free": True} if name in ("SFT", "DPO") else {}
    ours = make.of_trls_configuration(tmp_path, **padding_free)
    assert_same(ours.trajectory(), make.theirs(make.method.plain).trajectory())
    if padding_free:
        assert_mode_ran(ours, "padding-free")
        assert ours.trainer.args.padding_free


@LATER
@pytest.mark.parametrize(("name", "sharing"), product(cells("SFT", "DPO"), [False, True]))
def test_prompt_tuning_is_trls(name, sharing, make):
    # Right-padded, as TRL does it: left-padded, the virtual tokens of a row stand before its padding.
    ours = make.train("prompt tuning", padding_free=True, prefix_sharing=sharing)
    assert_same(ours.trajectory(), make.theirs("prompt tuning").trajectory())
    stats = ours.trainer.padding.stats
    assert 0 < stats.packed_tokens < stats.padded_tokens
    assert (stats.packed_tokens < stats.real_tokens) == sharing


@LATER
@pytest.mark.parametrize(("name", "mode"), every_second(product(cells("SFT", "DPO"), ["padded, left", *TWO_MODES])))
def test_flash_attention_2_is_trls(name, mode, make):
    """Evaluations are batches of eight, on either side."""
    with flash_attention_stand_in() as calls:
        models = {"model": build_model(attn_implementation="flash_attention_2")}
        if name == "DPO":
            models["ref_model"] = build_model(seed=1, attn_implementation="flash_attention_2")
        ours = make.train("short", given=models, **SIDED_MODES[mode])
        assert models["model"].config._attn_implementation == "flash_attention_2"
        assert len(calls) > 0
        if not mode.startswith("padded"):
            # A segment for every row, but for those that are the beginning of another.
            assert 4 < max(call.segments for call in calls) <= 16
            assert all(call.causal for call in calls)
    assert_same(ours.trajectory(), make.theirs("short").trajectory())
    assert_mode_ran(ours, mode)


@pytest.mark.parametrize("name", cells("SFT", "Reward", "KTO", "GRPO", "RLOO", "Distillation"))
def test_fractions_are_those_of_the_forwards_of_the_loss(name, make):
    online = {} if make.method.side else {"beta": 0.0}
    ours = make.train(make.method.plain, **MODES["prefix sharing"], max_steps=3, **online)
    forwards = 2 if name == "KTO" else 1
    for i, log in enumerate([log for log in ours.logs if "loss" in log]):
        assert 0 < log["padfix/pad_fraction"] < 1
        assert (-1 if name == "SFT" else 0) < log["padfix/shared_fraction"] < 1  # some of its batches share nothing
        if name != "RLOO":  # which scores what it has generated once more
            one = Run(ours.trainer, [], 0, ours.batches[forwards * i : forwards * (i + 1)]).counts()
            assert log["padfix/pad_fraction"] == pytest.approx(1 - one["padding-free"] / one["padded"])
            assert log["padfix/shared_fraction"] == pytest.approx(1 - one["prefix sharing"] / one["padding-free"])
        assert log["perf/tokens_per_second"] > 0
    evaluated = next(log for log in ours.logs if "eval_loss" in log)
    assert 0 < evaluated["eval_padfix/pad_fraction"] < 1
    assert 0 < evaluated["eval_padfix/shared_fraction"] < 1
    assert evaluated["eval_perf/tokens_per_second"] > 0


# -- what a script does with a trainer


@pytest.mark.parametrize("name", cells("SFT", "DPO"))
def test_good_rows_give_no_warning(name, make, caplog):
    with caplog.at_level(logging.WARNING):
        make.train("short", **MODES["prefix sharing"])
    assert our_warnings(caplog) == []


@pytest.mark.parametrize("name", cells("SFT", "DPO"))
def test_a_layout_is_built_with_its_batch_and_by_no_forward(name, make, monkeypatch):
    built = []
    monkeypatch.setattr(
        "trl_padfix.core.call.layout_of.prefix_sharing_layout",
        lambda *batch: built.append(batch) or prefix_sharing_layout(*batch),
    )
    make.train("short", given={"eval_dataset": None}, **MODES["prefix sharing"], parity_check=False)
    assert 5 <= len(built) <= 6  # the data loader fetches one ahead


@LATER
@pytest.mark.parametrize(("name", "mode"), product(cells("SFT", "DPO"), TWO_MODES))
def test_compute_metrics_sees_trls_logits_of_the_real_tokens(name, mode, make):
    def compute_metrics(prediction):
        logits, ids = (torch.as_tensor(values) for values in (prediction.predictions, prediction.label_ids))
        real = (ids >= 0) & (ids != SPECIAL["<pad>"])
        return {"sum": logits[real].double().abs().sum().item(), "tokens": int(real.sum())}

    config = {"loss_type": "nll"} if name == "SFT" else {}
    theirs, ours = (
        make(trainer_class, config | mode, compute_metrics=compute_metrics).evaluate()
        for trainer_class, mode in ((make.method.theirs, {}), (None, SIDED_MODES[mode]))
    )
    assert ours["eval_tokens"] == theirs["eval_tokens"]
    for figure in ("eval_sum", "eval_loss"):
        assert ours[figure] == pytest.approx(theirs[figure], rel=1e-5)


# -- the tests can fail


@KINDS
def test_a_run_that_removed_no_padding_is_not_taken_for_one_that_did(name, make):
    method = make.method
    for side in ("left", "right") if method.side else [""]:
        padded = make.train(method.plain, max_steps=2, **{"padding_side": side} if side else {})
        assert_mode_ran(padded, "padded")
        for mode in PACKED:
            with pytest.raises(AssertionError):
                assert_mode_ran(padded, mode)


@KINDS_AND_MODES
def test_a_leaking_layout_does_not_give_trls_trajectory(name, mode, make, monkeypatch):
    method = make.method
    ours = make.train(method.plain, **break_mode(monkeypatch, mode), parity_check=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(*method.metrics), make.theirs(method.plain).trajectory(*method.metrics))


@KINDS_AND_MODES
def test_a_leaking_layout_stops_training_and_evaluation(name, mode, make, monkeypatch):
    trainer = make(config=break_mode(monkeypatch, mode))
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(ParityError, match=r"parity FAILED .* difference of \d+ scores mean .*`padding_free=False`"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.evaluate()


# -- bad input


COLUMNS = {"KTO": "label", "GRPO": "prompt", "Distillation": "prompt", "Reward": "rejected"}


@pytest.mark.parametrize("name", cells(*COLUMNS))
def test_missing_columns_are_named(name, make):
    data = make.method.defaults["train_dataset"]()
    with pytest.raises(ValueError, match=f"no column '{COLUMNS[name]}'; it has"):
        make(train_dataset=data.rename_column(COLUMNS[name], "question"))


@pytest.mark.parametrize("name", cells("KTO", "GRPO", "RLOO"))
def test_images_without_a_vision_model_are_refused(name, make):
    data = make.method.defaults["train_dataset"]().select(range(4)).add_column("image", ["a.png"] * 4)
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM takes text only|vision"):
        make(config=MODES["padding-free"], train_dataset=data)


@pytest.mark.parametrize("name", cells("Reward"))
def test_images_for_a_reward_model_are_refused(name, make):
    data = build_pairs(4).add_column("images", [["a.png"]] * 4)
    with pytest.raises(PaddingRemovalError, match=r"image data.*padding_free=False"):
        make(config=MODES["padding-free"], train_dataset=data)


SCRIPTS = {path.stem: path for path in Path(trl.__file__).with_name("scripts").glob("*.py")}


@pytest.mark.parametrize("script", [name.lower() for name in METHODS if name.lower() in SCRIPTS])
def test_trls_script_runs_with_another_import(script):
    """`from trl import ...` of its scripts also names `ModelConfig`, `TrlParser`, `get_peft_config`."""
    text = SCRIPTS[script].read_text().replace("from trl import", "from trl_padfix import")
    names = {a.name for n in ast.walk(ast.parse(text)) if getattr(n, "module", "") == "trl_padfix" for a in n.names}
    ours = {name for name in names if getattr(trl_padfix, name) is not getattr(trl, name)}
    assert ours == names & {*trl_padfix.__all__}
    assert len(names) > len(ours) > 1
    exec(compile(text, script, "exec"), module := {"__name__": script})
    parsed, *_ = module["make_parser"]().parse_known_args(["--output_dir", "x", "--padding_free", "--bf16", "false"])
    assert parsed.padding_free is True  # a field of ours, or of another meaning in TRL
