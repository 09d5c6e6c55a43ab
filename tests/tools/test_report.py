"""What a run ends with: its report and its curves."""

import json

import trl

from trl_padfix.tools.report import plot_curves, summary_table, write_report


HISTORY = [
    {"step": 0, "eval_loss": 0.693, "eval_rewards/accuracies": 0.0},
    {"step": 1, "loss": 0.69, "rewards/accuracies": 0.0, "perf/tokens_per_second": 100.0},
    {"step": 2, "loss": 0.60, "rewards/accuracies": 0.9, "perf/tokens_per_second": 120.0},
    {"step": 2, "eval_loss": 0.61, "eval_rewards/accuracies": 1.0},
]


def test_curves_are_drawn_with_whole_axes_and_words_for_chance_and_ties(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **how: (figures.append(figure), path.touch()))
    assert plot_curves(HISTORY, tmp_path / "curves.png") == tmp_path / "curves.png"
    loss, accuracy, speed = figures[0].axes
    assert accuracy.get_ylim()[0] < 0
    assert accuracy.get_ylim()[1] > 1
    assert speed.get_ylim()[0] == 0
    labels = [text.get_text() for legend in figures[0].legends for text in legend.get_texts()]
    assert labels == ["training", "held-out", "chance: a coin chooses between the replies"]
    assert [text.get_text() for text in accuracy.texts] == ["all ties before training,\nwhich count as wrong"]
    assert not loss.texts


def test_a_run_too_short_for_a_curve_saves_no_picture(tmp_path):
    assert plot_curves(HISTORY[:2], tmp_path / "curves.png") is None
    assert list(tmp_path.iterdir()) == []


def test_the_report_has_metrics_configuration_and_versions(tmp_path):
    config = trl.DPOConfig(output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, report_to=[], beta=0.3)
    found = json.loads(write_report(HISTORY, config, tmp_path / "report.json").read_text())
    assert found["metrics"]["loss"] == {"first": 0.69, "last": 0.60, "steps": [1, 2]}
    assert found["configuration"]["beta"] == 0.3
    assert found["versions"]["trl"] == trl.__version__
    assert found["history"] == HISTORY


def test_the_table_says_what_all_ties_mean():
    assert "all ties, which count as wrong" in summary_table(HISTORY).caption
    assert summary_table([{"step": 1, "loss": 1.0}]).caption is None
