"""
What every method has in common: TRL's trajectory, generation included, whatever the mode, and what is refused.

DPO has a folder of its own; here it is for the older versions that `nox` runs.
"""

import pytest
import torch
from kit.cells import MATRIX, every_second, once_each, slow_but
from kit.methods import LOSSES, METHODS, PACKED, SIDED_MODES, TWO_MODES, build_pairs
from kit.sft_cases import OBJECTIVES
from kit.trainer_runs import MODES, Run, assert_mode_ran, assert_same, break_mode, build_model

from trl_padfix import PaddingRemovalError, ParityError


KINDS = pytest.mark.parametrize("name", slow_but(set(METHODS) - {"DPO"}, METHODS))


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
        *each_mode(cells("DPO"), []),
        *each_mode(cells("SFT", "Reward", "KTO"), ["padded, left", *TWO_MODES]),
        *each_mode(cells("GRPO", "RLOO"), ["padded", *PACKED]),
        *each_mode(cells("Distillation"), ["prefix sharing"]),
    ],
)
def test_a_run_and_an_evaluation_are_trls(name, mode, make):
    method = make.method
    ours, theirs = make.train(method.plain, **method.modes[mode]), make.theirs(method.plain)
    assert len(ours.trajectory()) == ours.trainer.args.max_steps + 1 > 10
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
    else:
        assert len({len(c) for c in ours.completions}) > 5


def assert_case_is_trls(make, case: str, mode: str) -> Run:
    method = make.method
    ours, theirs = make.train(case, **method.modes[mode]), make.theirs(case)
    left_out = method.means if method.means and ours.trainer.padding.task.may_group() else set()
    logged = {name for log in theirs.logs for name in log}
    metrics = [metric for metric in method.metrics if metric in logged - left_out]
    assert ours.completions == theirs.completions
    assert_same(ours.trajectory(*metrics), theirs.trajectory(*metrics), method.atol.get(case, 1e-6))
    for handle in ours.trainer.padding.handles:
        assert 0 < handle.stats.packed_tokens <= handle.stats.real_tokens < handle.stats.padded_tokens
    if case not in method.uncounted:
        assert_mode_ran(ours, mode)
    return ours


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
    ours = assert_case_is_trls(make, case, mode)
    if not make.method.side:
        assert ours.entered < make.theirs(case).entered


@pytest.mark.parametrize(
    ("name", "objective", "mode"), once_each([("SFT", objective) for objective in OBJECTIVES], list(SIDED_MODES))
)
def test_every_objective_is_trls(name, objective, mode, make):
    method = make.method
    ours = make.train(objective, **method.modes[mode])
    assert_same(ours.trajectory(*method.metrics), make.theirs(objective).trajectory(*method.metrics))
    assert_mode_ran(ours, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss", "mode"), once_each([("GRPO", loss) for loss in LOSSES], PACKED))
def test_every_loss_is_trls(name, loss, mode, make):
    assert_case_is_trls(make, loss, mode)


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


# The first run is that of any mode, by `test_import_alone.py` to the bit.
@pytest.mark.parametrize("name", slow_but([], cells("Reward", "KTO", "GRPO", "RLOO", "Distillation")))
def test_a_plain_configuration_of_trl_is_taken(name, make, tmp_path):
    assert_same(make.plain_configuration(tmp_path).trajectory(), make.theirs(make.method.plain).trajectory())


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


@pytest.mark.parametrize("mode", PACKED)
@KINDS
def test_a_leaking_layout_does_not_give_trls_trajectory(name, mode, make, monkeypatch):
    method = make.method
    ours = make.train(method.plain, **break_mode(monkeypatch, mode), parity_check=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(*method.metrics), make.theirs(method.plain).trajectory(*method.metrics))


@pytest.mark.parametrize("mode", PACKED)
@KINDS
def test_a_leaking_layout_stops_training_and_evaluation(name, mode, make, monkeypatch):
    trainer = make(config=break_mode(monkeypatch, mode))
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.train()
    assert trainer.state.global_step == 0
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


@pytest.mark.parametrize("name", cells("Reward", "GRPO"))
def test_a_wrapper_without_a_configuration_is_refused(name, make):
    class ValueHead(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pretrained_model = build_model("causal")

    with pytest.raises(TypeError, match=r"no `config`.*pass the model inside"):
        make(model=ValueHead())
