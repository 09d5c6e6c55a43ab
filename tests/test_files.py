"""Folders that appear whole or not at all."""

import os

import pytest

from trl_padfix.files import write_whole_folder


def test_a_folder_appears_only_as_a_whole_one(tmp_path):
    target = tmp_path / "runs" / "model"

    def half(folder):
        (folder / "c").write_text("three")
        raise OSError(28, os.strerror(28), "c")

    with pytest.raises(OSError, match="No space left"):
        write_whole_folder(target, half)
    assert [*target.parent.iterdir()] == []
    for name in ("a", "b"):
        write_whole_folder(target, lambda folder, name=name: (folder / name).touch())
        assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_two_processes_of_one_id_write_one_folder_and_each_of_them_whole(tmp_path):
    def as_another_process(folder):
        (folder / "a").write_text("one")
        write_whole_folder(tmp_path / "model", lambda second: (second / "a").write_text("two"))
        (folder / "b").write_text("one")

    write_whole_folder(tmp_path / "model", as_another_process)
    assert {path.name: path.read_text() for path in (tmp_path / "model").iterdir()} == {"a": "two"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
