"""Lines about a run for its user."""

import logging

from trl_padfix.trainers.messages import say


def test_a_level_of_the_package_silences_lines(capsys, monkeypatch):
    say("one")
    monkeypatch.setattr(logging.getLogger("trl_padfix"), "level", logging.WARNING)
    say("two")
    assert capsys.readouterr().out.split() == ["one"]
