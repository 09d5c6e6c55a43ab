"""`trl-padfix recipe`, as a user runs it."""

import filecmp

import pytest
from kit.commands import trl_padfix_command

from trl_padfix.cli.recipe import folder
from trl_padfix.tools.data import load_rows


def test_every_recipe_is_listed_with_what_it_trains():
    printed = trl_padfix_command("recipe", "list").output
    for path in [*folder().glob("*.yaml"), *folder().glob("accelerate/*.yaml")]:
        assert str(path.relative_to(folder())) in printed
    assert "DPO of a tiny random Qwen2" in printed
    assert all(line.startswith("    ") or line.endswith(".yaml") for line in printed.splitlines())


def test_a_recipe_is_shown_as_it_is_and_needs_no_ending():
    for name in ("sft_tiny", "accelerate/cpu", "dpo_tiny.yaml"):
        file = name if name.endswith(".yaml") else f"{name}.yaml"
        assert trl_padfix_command("recipe", "show", name).output == (folder() / file).read_text()


def test_recipes_are_copied_and_nothing_is_written_over(tmp_path):
    to = tmp_path / "mine"
    for name in ("dpo_tiny.yaml", "accelerate/cpu.yaml"):
        assert trl_padfix_command("recipe", "copy", name, str(to)).exit_code == 0
        assert (to / name).read_text() == (folder() / name).read_text().replace("recipes/", f"{to}/")
    for name in ("data/preferences/train.jsonl", "dpo.py"):  # which the recipe reads, and its first lines run
        assert filecmp.cmp(folder() / name, to / name, shallow=False) or name.endswith(".py")
    assert not (to / "data/gsm8k").exists()  # of other recipes
    assert load_rows(str(to / "dpo_tiny.yaml"))
    (to / "dpo_tiny.yaml").write_text("mine")
    again = trl_padfix_command("recipe", "copy", "all", str(to))
    assert again.exit_code == 2
    assert "nothing is written over" in again.output
    assert (to / "dpo_tiny.yaml").read_text() == "mine"
    result = trl_padfix_command("recipe", "copy", "all", str(tmp_path / "all"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "all" / "data" / "preferences" / "train.jsonl").exists()


def test_a_copy_that_is_there_already_is_said(tmp_path):
    said = [trl_padfix_command("recipe", "copy", "accelerate/cpu", str(tmp_path)).output.split() for _ in range(2)]
    assert [" ".join(words) for words in said] == [
        f"1 file copied to {tmp_path}",
        f"0 files copied to {tmp_path}; 1 was there already, the same",
    ]


def test_a_name_that_is_not_there_is_a_usage_error():
    result = trl_padfix_command("recipe", "show", "../pyproject.toml")
    assert result.exit_code == 2
    assert "there is no recipe '../pyproject.toml'" in result.output


@pytest.mark.parametrize(("typed", "meant"), [("stf_tiny", "sft_tiny"), ("dpo_tiny.yml", "dpo_tiny.yaml")])
def test_a_typo_is_answered_with_the_nearest_name(typed, meant):
    said = trl_padfix_command("recipe", "show", typed).output
    assert f"there is no recipe '{typed}'. Is '{meant}' meant?" in said
