"""Messages of libraries in one line, as they are repeated to a user."""

from __future__ import annotations

import pytest

from trl_padfix.tools.reading import reason, shortened


METRICS = [f"eval_{kind}/{side}" for kind in ("rewards", "logps", "logits", "entropies") for side in range(12)]


def test_a_message_that_lists_the_metrics_of_an_evaluation_is_repeated_whole():
    text = f"`metric_for_best_model` is set to 'eval_los'. The available evaluation metrics are: {METRICS}. Do this."
    assert 900 < len(text) < 1200
    assert reason(ValueError(text)) == text


@pytest.mark.parametrize("words", [["metric"] * 300, ["metric,"] * 300])
def test_a_longer_message_is_cut_after_a_word(words):
    *kept, mark = reason(ValueError(" ".join(words))).split(" ")
    assert mark == "[...]"
    assert set(kept) == set(words)
    assert 140 < len(kept) < 300


def test_a_text_of_just_the_length_is_whole_and_one_endless_word_is_cut():
    assert shortened("two words", 9) == "two words"
    assert shortened("two words", 8) == shortened("two words", 3) == "two [...]"
    assert shortened("x" * 20, 8) == "xxxxxxxx [...]"
