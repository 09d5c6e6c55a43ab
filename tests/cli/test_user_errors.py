"""Mistakes of the user: a message, exit code 2, nothing written, and no wait. Bugs of ours: their traceback."""

import errno
import os
import resource
import time
from pathlib import Path

import pytest
import torch
from kit.bad_inputs import build_bad_data, build_bad_models
from kit.commands import trl_padfix_command

from trl_padfix.cli import user_errors


CPU = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
GPU = str(Path(__file__).parents[2] / "recipes/dpo_qwen2.5_0.5b.yaml")


def stats(data, *more):
    return ["stats", data, "--train-tokenizer", "300", "--world-size", "2", *more]


def tokenized(name):
    return ["stats", "good.jsonl", "--tokenizer", name, "--world-size", "2"]


def parity(*more):
    return ["parity", "--rows", "2", *more]


def compared(model, data="good.jsonl"):
    return parity("--model", model, "--data", data)


OF_DATA = {
    "corrupt.jsonl": "cannot be read: JSON parse error",
    "empty.jsonl": "is empty: it has no row",
    "latin.jsonl": "Text is UTF-8",
    "null.jsonl": "Row 3 (counted from 0) has None in column `text`",
    "columns.jsonl": "['words']",
    "no_role.jsonl": "without a text `role`",
    "plain.json.gz": "Not a gzipped file",
    "cut.json.gz": "ended before the end-of-stream marker",
    "cut.parquet": "cannot be read",
    "folder.jsonl": "is a folder with the name of a file",
    "empty_folder": "doesn't contain any data files",
    "nowhere.jsonl": "There is no file nowhere.jsonl",
    "nowhere/at_all": "Couldn't reach 'nowhere/at_all' on the Hub (OfflineModeIsEnabled), and there is no folder",
    "a:b//c": "cannot be read",
    "broken.yaml": "line 2",
    "list.yaml": "holds a list",
    "no_data.yaml": "names no data",
    "bad_length.yaml": "`max_length`",
    "bad_split.yaml": "nowhere",
    "bad_mixture.yaml": "data_fils",
}

READ = ("corrupt.jsonl", "nowhere.jsonl")

OF_TOKENIZERS = {
    "no_tokenizer": "its files are missing",
    "tokenizer_empty": "cannot be read",
    "tokenizer_cut": "cannot be read",
    "tokenizer_config_cut": "cannot be read",
    "nowhere/model": "cannot be read",
    "/nowhere/at/all": "there is no such folder here",
    "": "cannot be read",
}

OF_MODELS = {
    "no_weights": "model.safetensors",
    "no_config": "cannot be read",
    "cut_weights": "incomplete metadata",
    "empty_weights": "header too small",
    "pickled_weights": "model.safetensors",
    "other_shape": "cannot be read",
    "other_type": "abacus",
    "heads_in_words": "num_attention_heads",
    "config_cut": "not a valid JSON file",
    "config_list": "cannot be read",
    "config_empty": "model_type",
    "small_vocabulary": "has embeddings for 0 to 49",
}

OUTPUTS = {
    "": "a folder",
    "nowhere/out.json": "there is no folder",
    "good.jsonl/out.json": "is a file, not a folder",
    "/proc/out.json": "cannot be written",
    "x" * 300: "too long",
}

CASES = (
    [("stats", stats(name), message) for name, message in OF_DATA.items()]
    + [("stats of pairs", stats("null_pairs.jsonl"), "Row 12 (counted from 0) has None in column `rejected`")]
    + [("stats, YAML", stats("bad_batch.yaml"), "`per_device_train_batch_size` of the YAML is -1")]
    + [("tokenizer", tokenized(f"models/{n}" if n.isidentifier() else n), m) for n, m in OF_TOKENIZERS.items()]
    + [("output", stats("good.jsonl", "--json", name or "."), message) for name, message in OUTPUTS.items()]
    + [("picture", stats("good.jsonl", "--plot", name or "."), message) for name, message in OUTPUTS.items()]
    + [
        ("stats", stats("good.jsonl", "--json", "one", "--plot", "one"), "write the same file"),
        ("stats", ["stats", "good.jsonl"], "Give one of `--tokenizer` and `--train-tokenizer`"),
        ("stats", stats("good.jsonl", "--tokenizer", "models/good"), "Give one of"),
        ("stats", stats("good.jsonl", "--seed", "-1"), "--seed"),
        ("stats", stats("good.jsonl", "--max-length", "9" * 20), "less than or equal to"),
        ("stats", ["stats", "good.jsonl", "--train-tokenizer", "9" * 12], "less than or equal to"),
        ("stats", stats("good_folder", "--split", "nowhere"), "nowhere"),
        ("stats", stats("good.jsonl", "--truncation-mode", "middle"), "'middle' is not one of"),
        ("stats", stats("pairs.jsonl", "--max-length", "1"), "leaves no row"),
        ("stats", stats("good.jsonl", "--batch-size", "100000"), "a step of 800,000 rows"),
        ("stats", stats("good.jsonl", "--batch-size", "0"), "--batch-size"),
        ("stats", stats("good.jsonl", "--accumulation", "99999"), "a step of"),
        *((f"world {w}", stats("good.jsonl", "--world-size", w), "--world-size")
          for w in ("0", "-2", "two", "", "2,,4", "2,0", "999999")),
        *((f"parity {name}", compared(f"models/{name}"), message) for name, message in OF_MODELS.items()),
        # All commands read data, recipes and tokenizers by the functions that `stats` calls.
        *((f"parity {name}", compared("models/good", name), OF_DATA[name]) for name in READ),
        ("parity", compared("models/no_tokenizer"), OF_TOKENIZERS["no_tokenizer"]),
        ("parity --config", parity("--model", "models/good", "--config", "list.yaml"), OF_DATA["list.yaml"]),
        ("parity", compared("models/good", "no_text.jsonl"), "A row has no token"),
        ("parity", parity("--data", "good.jsonl"), "give a model"),
        ("parity", parity("--model", "models/good"), "give the data"),
        ("parity", parity("--config", "nowhere.yaml"), "no such file"),
        ("parity", parity("--config", "good_folder"), "it is a folder"),
        ("parity", parity("--config", "bad_model.yaml"), "give a model"),
        ("parity", [*compared("models/good"), "--dtype", "float8"], "float8"),
        ("parity", [*compared("models/good"), "--device", "abacus"], "abacus"),
        ("parity", [*compared("models/good"), "--rows", "0"], "--rows"),
        ("parity", [*compared("models/good"), "--max-length", "1"], "--max-length"),
        ("doctor", ["doctor", "--dtype", "int3"], "int3"),
        ("doctor", ["doctor", "--explain", "x", "--model", "y"], "--explain"),
        ("dpo", ["dpo", *CPU, "--nonsense=1"], "--nonsense=1: neither a field"),
        ("dpo", ["dpo", *CPU, "recipe.yaml"], "recipe.yaml: neither a field"),
        ("dpo", ["dpo", "--config", "nonsense.yaml"], "the key `nonsense` (nonsense.yaml, line 2): neither a field"),
        ("dpo", ["dpo", "--lerning_rate", "1"], "Is `learning_rate` meant?"),
        ("dpo", ["dpo", "--num_generations", "4"], "`num_generations` is a field of `trl-padfix grpo`"),
        ("dpo", ["dpo"], "nothing is given to train"),
        ("dpo", ["dpo", *CPU, "--dataset_name", "good_folder"], "no model is given: set `--model_name_or_path`"),
        ("dpo", ["dpo", "--bf16", "true", "--config", "no_data.yaml"], "`--bf16` turns bf16 on"),
        ("dpo", ["dpo", *CPU, "--model_name_or_path", "./nowhere"], "there is no file or folder './nowhere'"),
        *(("dpo", ["dpo", *CPU, "--dataset_name", name], message) for name, message in {
            "./nowhere": "there is no file or folder './nowhere'",
            "good.jsonl": "'good.jsonl' is a file. Give a folder or a Hub id; in a YAML (`--config`) a file is "
                          "`datasets: [{path: json, data_files: good.jsonl}]`",
            "nowhere.parquet": "'nowhere.parquet' names a file, and there is none here",
        }.items()),
        *((f"dpo --config {name}", ["dpo", *CPU, "--config", name], message)
          for name, message in {"broken.yaml": "line 2", "list.yaml": "holds a list", "good_folder": "it is a folder",
                                "nowhere.yaml": "'nowhere.yaml'"}.items()),
        ("dpo", ["dpo", *CPU, "--config"], "`--config` is the last word"),
        ("dpo", ["dpo", *CPU, "--output_dir", "good.jsonl/x"], "`output_dir`"),
        ("dpo", ["dpo", *CPU, "--output_dir", "/proc/x"], "`output_dir`"),
        ("dpo", ["dpo", *CPU, "--resume_from_checkpoint", "latest"], "there is no whole checkpoint in"),
        ("dpo", ["dpo", *CPU, "--resume_from_checkpoint", "nowhere"], "there is no such folder"),
        ("dpo", ["dpo", *CPU, "--seed", "one"], "invalid int value"),
        ("dpo", ["dpo", *CPU, "--num_processes", "few"], "invalid int value: 'few'"),
        ("dpo", ["dpo", *CPU, "--padding_side", "top"], "invalid choice: 'top'"),
        ("dpo", ["dpo", *CPU, "--prefix_sharing"], "`prefix_sharing=True` needs `padding_free=True`"),
        ("dpo", ["dpo", *CPU, "--prefix_sharing", "maybe"], "expected true, false or auto, got 'maybe'"),
        ("dpo", ["dpo", *CPU, "--parity_check", "maybe"], "expected true, false or forward, got 'maybe'"),
        ("dpo", ["dpo", "--output_dir", "x"], "To train without it, add `--bf16 false --use_cpu true`"),
        ("dpo", ["dpo", "--config", GPU], "set `bf16: false` and `use_cpu: true` in"),
        ("sft", ["sft", *CPU, "--eval_strategy", "often"], "often"),
        ("reward", ["reward", *CPU, "--accelerate_config", "nowhere"], "nowhere"),
        ("no command", ["trainn"], "trainn"),
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    build_bad_data(folder)
    build_bad_models(folder / "models")
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(material, monkeypatch):
    monkeypatch.chdir(material)
    monkeypatch.delenv(user_errors.DEBUG, raising=False)


@pytest.fixture
def without_waiting(monkeypatch):
    """No command waits before it says what is wrong, for another try of the Hub as an example."""

    def wait(seconds):
        pytest.fail(f"it waits for {seconds} s")

    monkeypatch.setattr(time, "sleep", wait)


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("args", "message"),
    [pytest.param(args, says, id=f"{i}-{name}") for i, (name, args, says) in enumerate(CASES)],
)
def test_a_mistake_is_a_message_and_exit_code_2(args, message, material, without_waiting):
    before = files(material)
    result = trl_padfix_command(*args)
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert message in result.output
    assert "Traceback" not in result.output
    assert files(material) == before


@pytest.mark.parametrize("args", [["--debug", *stats("corrupt.jsonl")], [*stats("corrupt.jsonl"), "--debug"]])
def test_debug_shows_the_traceback(args, capfd, monkeypatch):
    monkeypatch.setenv(user_errors.DEBUG, "")
    result = trl_padfix_command(*args)
    assert result.exit_code == 2
    assert "Traceback" in result.output + capfd.readouterr().err
    assert "cannot be read" in result.output


def test_a_bug_of_ours_keeps_its_traceback_and_asks_for_a_report(monkeypatch):
    def broken(*args, **kwargs):
        return {}["logits"]

    monkeypatch.setattr("trl_padfix.tools.stats.measure", broken)
    result = trl_padfix_command(*stats("good.jsonl"))
    assert result.exit_code == 1
    assert isinstance(result.exception, KeyError)
    assert "is not known here" in result.output
    assert "Please report it" in result.output


def raised(text: str) -> BaseException:
    """An error of a package that checks nothing, as it is caught."""
    error = type("NoMatchingError", (ValueError,), {"__module__": "peft.utils"})(text)
    try:
        raise error
    except ValueError as caught:
        return caught


def test_an_error_that_is_known_is_explained_and_no_mistake_of_ours():
    message = user_errors.describe(raised("Target modules nonsense not found in the base model."))
    assert "nonsense not found" in message
    assert "What to do: `target_modules='all-linear'`" in message
    assert user_errors.describe(raised("Something nobody has seen.")) is None


def test_what_another_package_says_comes_with_what_is_known_of_it():
    from transformers import Trainer, TrainingArguments

    with pytest.raises(ValueError, match="save and eval strategy to match") as error:
        TrainingArguments("x", load_best_model_at_end=True, use_cpu=True)
    assert "What to do: Set `eval_strategy` and `save_strategy` alike" in user_errors.describe(error.value)
    trainer = Trainer(torch.nn.Linear(1, 1), TrainingArguments("x", use_cpu=True, report_to="none"))
    with pytest.raises(ValueError, match="requires an eval_dataset") as error:
        trainer.evaluate()
    assert "and `eval_on_start=False`" in user_errors.describe(error.value)


def test_a_split_that_is_not_there_is_named_with_those_that_are():
    from datasets import Dataset, DatasetDict

    with pytest.raises(KeyError) as error:
        DatasetDict(train=Dataset.from_list([{"a": 1}]))["nosplit"]
    assert "no split 'nosplit'; there is 'train'" in user_errors.describe(error.value)
    with pytest.raises(KeyError) as error:
        {}["nosplit"]
    assert user_errors.describe(error.value) is None


def test_an_error_of_another_package_is_said_to_be_its(capsys):
    import numpy as np

    with pytest.raises(np.linalg.LinAlgError), user_errors.explain_errors("trl-padfix dpo"):
        np.linalg.inv(np.zeros((2, 2)))
    said = capsys.readouterr().err
    assert f"is not known here; numpy {np.__version__} raised it" in said
    assert "mistake of trl-padfix" not in said


def test_a_reader_that_has_gone_is_not_told_of():
    with (
        pytest.raises(BrokenPipeError),
        user_errors.explain_errors("trl-padfix doctor"),
    ):  # which click ends without a word
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("error", [TypeError("an argument is missing"), AssertionError(), IndexError("out of range")])
def test_an_error_is_a_message_only_if_code_that_checks_raised_it(error):
    from trl_padfix.tools.stats import BatchTokens
    from trl_padfix.trainers.data.row_checks import check_row

    with pytest.raises(ValueError, match="Row 0") as worded:
        check_row({"text": None}, 0)
    assert user_errors.describe(worded.value) == str(worded.value)
    with pytest.raises(TypeError) as accident:
        BatchTokens()
    assert user_errors.describe(accident.value) is None
    with pytest.raises(type(error)) as raised:
        raise error
    assert user_errors.describe(raised.value) is None


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_figures_are_printed_before_a_file_that_cannot_be_written(option, material, tmp_path):
    target = tmp_path / ("figures.json" if option == "--json" else "figures.png")
    target.write_text("as it was")
    arguments = ["stats", "good.jsonl", "--tokenizer", "models/good"]
    assert trl_padfix_command(*arguments).exit_code == 0  # what `datasets` and the fonts cache is on the disk already
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))  # as a disk that fills up while the file is written
    try:
        result = trl_padfix_command(*arguments, option, str(target))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 2, result.exception
    assert "12 rows of good.jsonl" in result.output
    assert "was not written" in result.output
    assert "ulimit -f" in result.output
    assert ('"lengths"' in result.output) == (option == "--json")  # measured figures are not lost
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert target.read_text() == "as it was"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    result = trl_padfix_command(*stats("good.jsonl", "--json", str(tmp_path / "x.json")))
    assert result.exit_code == 2
    assert "no permission" in result.output
