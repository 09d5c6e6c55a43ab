"""Files that appear whole or not at all."""

import os

import pytest

from trl_padfix.files import folder_obstacle, write_whole, write_whole_folder


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path):
    target = tmp_path / "figures.json"
    write_whole(target, lambda path: path.write_text("one"))
    write_whole(target, lambda path: path.write_text("two"))
    assert target.read_text() == "two"

    def half(path):
        path.write_text("thr")
        assert path.suffix == ".json"  # libraries choose the format by it
        assert target.read_text() == "two"
        raise OSError(28, os.strerror(28), str(path))

    with pytest.raises(OSError, match="No space left"):
        write_whole(target, half)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"figures.json": "two"}


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


def test_where_nothing_can_be_written_is_said_beforehand(tmp_path):
    (tmp_path / "file").write_text("")
    assert folder_obstacle(tmp_path / "a" / "b") is None
    for path, reason in {
        tmp_path / "file" / "a" / "b": "is a file, not a folder",
        tmp_path / ("x" * 300): "too long",
        "/proc/a/b": "cannot be written",
    }.items():
        assert reason in folder_obstacle(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # asking leaves nothing


def test_two_processes_write_one_folder_and_each_of_them_whole(tmp_path, monkeypatch):
    def as_another_process(folder):
        (folder / "a").write_text("one")
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: -1)
            write_whole_folder(tmp_path / "model", lambda second: (second / "a").write_text("two"))
        (folder / "b").write_text("one")

    write_whole_folder(tmp_path / "model", as_another_process)
    assert {path.name: path.read_text() for path in (tmp_path / "model").iterdir()} == {"a": "two"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
