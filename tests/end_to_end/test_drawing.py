"""`notebooks/drawing.py`: the pictures of the notebooks."""

import drawing
import numpy as np
import torch
from drawing import draw, draw_race, draw_rows, over_time, rows_of

from trl_padfix import padding_free_layout, prefix_sharing_layout


IDS = torch.tensor([[5, 6, 7], [5, 8, 0]])
MASK = (IDS > 0).long()
_ = np.nan


def test_cells_are_coloured_by_their_row_and_shared_ones_by_none():
    np.testing.assert_array_equal(rows_of(MASK), [[0, 0, 0], [1, 1, _]])
    np.testing.assert_array_equal(rows_of(padding_free_layout(MASK)), [[0, 0, 0], [1, 1, _]])
    np.testing.assert_array_equal(rows_of(padding_free_layout(MASK.flip(1))), [[0, 0, 0], [1, 1, _]])
    shared = rows_of(prefix_sharing_layout(IDS, MASK))
    assert sorted(shared[~np.isnan(shared)]) == [-1, 0, 0, 1]


def test_seconds_are_counted_from_the_end_of_the_first_step(monkeypatch):
    moments = iter((100.0, 101.5, 104.0))
    monkeypatch.setattr(drawing.time, "perf_counter", lambda: next(moments))
    assert over_time(loss for loss in (3.0, 2.0, 1.0)) == ([0.0, 1.5, 4.0], [3.0, 2.0, 1.0])


def test_a_race_draws_both_curves_over_time_and_says_how_long_each_took(monkeypatch, capsys):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "show", lambda: None)
    draw_race({"padded": ([0.0, 4.0], [2.0, 1.0]), "padding-free": ([0.0, 1.0], [2.0, 1.0])})
    over_steps, over_seconds = plt.gcf().axes
    curves = {line.get_label(): list(line.get_xdata()) for line in over_seconds.lines}
    assert curves == {"padded": [0.0, 4.0], "padding-free": [0.0, 1.0]}
    assert [list(line.get_xdata()) for line in over_steps.lines] == [[1, 2], [1, 2]]
    assert [axis.get_xlabel() for axis in (over_steps, over_seconds)] == ["steps", "seconds"]
    assert capsys.readouterr().out.splitlines() == ["padded: 4.0 s, 1.0x", "padding-free: 1.0 s, 4.0x"]
    draw({"tokens": {"padded": 6.0, "packed": 4.0}})
    assert [bar.get_height() for bar in plt.gcf().axes[0].patches] == [6.0, 4.0]
    draw_rows({"padded": rows_of(MASK), "packed": rows_of(padding_free_layout(MASK))})
    assert [axis.get_title() for axis in plt.gcf().axes] == ["padded", "packed"]
    plt.close("all")
