"""A parity error of one of two processes is raised on both, and none waits for the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.processes import trained


@pytest.mark.slow
def test_a_parity_error_of_one_process_is_raised_on_both(tmp_path):
    trained("multi_gpu", tmp_path, "kit.process_errors", tmp_path)
    first, second = (json.loads(Path(tmp_path, f"errors-{rank}.json").read_text()) for rank in range(2))
    for fault in ("first batch", "longest row"):
        assert second[fault].startswith("ParityError: ")
        assert first[fault].startswith("RuntimeError: Process 1 stopped, and this process would wait for it.")
        assert first[fault].endswith(second[fault])
    assert "longest row" in second["longest row"]
    assert first[""] == second[""] == ""
