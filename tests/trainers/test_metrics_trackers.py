"""Trackers: what others see of a training."""

import pytest
from kit.methods import make_trainer
from kit.trainer_runs import MODES, build_pairs

import trl_padfix


OURS = {"padfix/pad_fraction", "padfix/shared_fraction", "perf/tokens_per_second"}


@pytest.fixture
def train(tmp_path):
    """Two steps of DPO and an evaluation."""

    def run(**settings):
        rows = {"train_dataset": build_pairs(12, prompt=(2, 8), common=3), "eval_dataset": build_pairs(3, common=3)}
        trainer = make_trainer(trl_padfix, "DPO", tmp_path, max_steps=2, eval_strategy="epoch", **rows, **settings)
        trainer.train()
        return trainer

    return run


def logged(trainer) -> dict[str, list[float]]:
    """What a tracker is to show of the numbers that the trainer logged."""
    shown: dict[str, list[float]] = {}
    for log in trainer.state.log_history:
        for name, value in log.items():
            mode = "eval" if name.startswith("eval_") else "train"
            shown.setdefault(f"{mode}/{name.removeprefix('eval_')}", []).append(value)
    wanted = {f"{mode}/{name}" for mode in ("train", "eval") for name in OURS}
    assert wanted <= shown.keys()
    return {name: shown[name] for name in wanted}


def test_tensorboard_shows_our_metrics(train, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = train(report_to=["tensorboard"], **MODES["prefix sharing"])
    shown = EventAccumulator(str(next((tmp_path / "events").rglob("events.*")).parent)).Reload()
    for name, values in logged(trainer).items():
        assert [event.value for event in shown.Scalars(name)] == pytest.approx(values)
