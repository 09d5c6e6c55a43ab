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
    assert second["True"].startswith("ParityError: ")
    assert first["True"].startswith("RuntimeError: Process 1 stopped, and this process would wait for it.")
    assert first["True"].endswith(second["True"])
    assert first["False"] == second["False"] == ""
