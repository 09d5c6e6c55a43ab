"""`trl-padfix dpo` and the others: TRL's command line, with our trainers."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import accelerate.commands.launch as accelerate_launch
import psutil
import pytest
import torch
import trl
import yaml
from kit.commands import logs_of, run_script, save_tiny_model, trl_padfix_command
from safetensors.torch import load_file
from transformers import set_seed

from trl_padfix.cli import INTERRUPTED, METHODS
from trl_padfix.cli.app import pass_on
from trl_padfix.cli.config_file import declared_fields, name_of
from trl_padfix.cli.launch import main, make_parser, one_interrupt, parse, run
from trl_padfix.files import refuse_missing


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A YAML as one writes it for `trl dpo`, and the model and the pairs that it names."""
    directory = tmp_path_factory.mktemp("recipe")
    pairs = save_tiny_model(directory / "model", initializer_range=0.2)
    pairs.to_json(directory / "data" / "train.jsonl")
    settings = {
        "model_name_or_path": str(directory / "model"),
        "datasets": [{"path": "json", "data_files": str(directory / "data" / "train.jsonl")}],
        "test_split_size": 4,
        "env": {"SEEN_BY_EVERY_PROCESS": 3},
        "num_processes": 1,  # of `accelerate launch`
        "max_steps": 3,
        "max_length": 256,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("SEEN_BY_EVERY_PROCESS", "")  # put back what a YAML sets


def trl_script(method: str):
    return importlib.import_module(f"trl.scripts.{method}")


def losses(output: Path) -> list[float]:
    found = [log[name] for log in logs_of(output) for name in ("loss", "eval_loss", "grad_norm") if name in log]
    assert len(found) == 2 * 3 + 1
    return found


@pytest.fixture(scope="module")
def trls(recipe, tmp_path_factory):
    """What TRL's own script computes."""
    output = tmp_path_factory.mktemp("trl")
    script = trl_script("dpo")
    args = script.make_parser().parse_args_and_config(
        ["--config", str(recipe), "--output_dir", str(output)], fail_with_unknown_args=False
    )
    set_seed(42)  # it draws the held-out rows without a seed
    script.main(*args)
    return losses(output)


def test_a_yaml_for_trl_runs_unchanged(recipe, trls, tmp_path, capsys):
    main("dpo", ["--config", str(recipe), "--output_dir", str(tmp_path)])
    assert "TRL's code computes each step. To remove padding, set" in capsys.readouterr().out
    assert losses(tmp_path) == pytest.approx(trls, rel=1e-4)
    assert os.environ["SEEN_BY_EVERY_PROCESS"] == "3"


def test_accelerate_does_not_list_the_defaults_that_it_sets(recipe, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(accelerate_launch, "default_config_file", str(tmp_path / "none.yaml"))
    monkeypatch.setattr(accelerate_launch.logger, "filters", [])
    accelerate_launch._validate_launch_command(accelerate_launch.launch_command_parser().parse_args(["a.py"]))
    assert "`--num_machines` was set to a value of `1`" in caplog.text
    caplog.clear()
    _, launch = parse("dpo", ["--config", str(recipe)])
    accelerate_launch._validate_launch_command(launch)
    assert (launch.num_processes, launch.num_machines) == (1, 1)  # of the YAML; its default
    accelerate_launch.logger.warning("all else")
    assert [record.getMessage() for record in caplog.records] == ["all else"]
    config = ["--accelerate_config", str(ROOT / "recipes/accelerate/cpu.yaml")]
    _, launch = parse("dpo", ["--config", str(recipe), *config])
    assert launch.num_machines is launch.mixed_precision is None  # of the configuration


def final_weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


@pytest.fixture(scope="module")
def unbroken(recipe, tmp_path_factory) -> Path:
    """A training of four steps that saved at the second one, and was never stopped."""
    output = tmp_path_factory.mktemp("unbroken")
    main("dpo", [*RESUMED, "--config", str(recipe), "--output_dir", str(output)])
    return output


RESUMED = ["--padding_free", "true", "--max_steps", "4", "--save_steps", "2", "--eval_strategy", "no"]


def test_a_stopped_training_goes_on_to_the_same_weights(recipe, unbroken, tmp_path, caplog):
    shutil.copytree(unbroken / "checkpoint-2", tmp_path / "checkpoint-2")
    shutil.copytree(unbroken / "checkpoint-4", tmp_path / "checkpoint-3")  # as a full disk or a kill leaves it
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    flags = ["--config", str(recipe), "--output_dir", str(tmp_path), "--resume_from_checkpoint", "latest"]
    main("dpo", [*RESUMED, *flags])
    assert caplog.text.count("checkpoint-3: it has no complete `trainer_state.json`") == 1
    expected, found = final_weights(unbroken), final_weights(tmp_path)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert [log["step"] for log in logs_of(tmp_path) if "loss" in log] == [1, 2, 3, 4]


def test_a_yaml_may_say_to_resume(recipe, unbroken, tmp_path):
    path = tmp_path / "resume.yaml"
    path.write_text(
        yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {"resume_from_checkpoint": True, "run_name": 7})
    )
    (_, training, *_), _ = parse("dpo", ["--config", str(path), "--output_dir", str(unbroken)])
    assert (training.resume_from_checkpoint, training.run_name) == (str(unbroken / "checkpoint-4"), "7")
    flags = ["--output_dir", str(unbroken), "--padding_free", "--no-padding-free", "--no_use_cpu"]
    (_, training, *_), _ = parse("dpo", [f"--config={recipe}", *flags])
    assert (training.resume_from_checkpoint, training.padding_free, training.use_cpu) == (None, False, False)


def test_other_rows_give_other_losses(recipe, trls, tmp_path):
    main("dpo", ["--config", str(recipe), "--output_dir", str(tmp_path), "--seed", "1"])
    assert losses(tmp_path) != pytest.approx(trls, rel=1e-2)
    with pytest.raises(ValueError, match=r"no row is left: each prompt or row is too long for max_length=2\."):
        main("dpo", ["--config", str(recipe), "--output_dir", str(tmp_path), "--max_length", "2"])


def test_trl_has_its_own_classes_again_afterwards(recipe, tmp_path):
    theirs = (trl.DPOTrainer, trl.DPOConfig)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="Unrecognized model"):
        main("dpo", ["--config", str(recipe), "--model_name_or_path", str(tmp_path), "--output_dir", str(tmp_path)])
    assert (trl.DPOTrainer, trl.DPOConfig) == theirs
    assert all(c.__module__.startswith("trl.") for c in theirs)


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_help_shows_our_fields_first_and_all_of_trls(method):
    result = trl_padfix_command(method, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"usage: trl-padfix {method} [--config FILE.yaml]")
    with pytest.raises(SystemExit, match="0"):  # as the scripts of `recipes/`
        run(method, ["--help"])
    ours, theirs = result.output.split("\noptions:\n")
    assert ours.count("padding removal:\n") == 1
    words = set(ours.replace(",", " ").split())
    assert {"--padding_free", "--prefix_sharing", "--parity_check", "--dry_run", "--max_tokens_per_batch"} <= words
    assert "--learning_rate" not in words
    text = " ".join(ours.split())
    assert "Skip padding: the decoder receives one row" in text  # as its docstring says
    assert "--strict [true|false] Raise an error if a forward cannot be packed" in text
    assert "or 'auto'" in text
    assert not re.search(r"^  --padding_free", theirs, re.MULTILINE)
    all_fields = {action.dest for action in make_parser(method)._actions}
    assert {a.dest for a in trl_script(method).make_parser()._actions} <= all_fields
    assert all(f"--{name}" in result.output for name in ("dataset_name", "model_name_or_path", "learning_rate"))


def test_names_that_nothing_takes_are_all_told_at_once_with_their_lines(recipe, tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("torch_dtype: bfloat16\nnonsense: 1\n" + recipe.read_text() + "max_prompt_length: 8\n")
    with pytest.raises(ValueError, match="not a field of `trl-padfix dpo`") as error:
        parse("dpo", ["--config", str(path), "--lerning_rate", "1", "--max-steps", "2"])
    last = len(path.read_text().splitlines())
    told = str(error.value).splitlines()[1:]
    assert told[0] == f"  {path}, line 1: torch_dtype (it is `dtype` now)"
    assert told[1] == f"  {path}, line 2: nonsense"
    assert told[2].startswith(f"  {path}, line {last}: max_prompt_length (removed from TRL")
    assert told[3] == "  --lerning_rate (did you mean `learning_rate`?)"
    assert len(told) == 4


@pytest.mark.parametrize("method", METHODS)
def test_the_fields_read_from_source_are_those_of_the_parser(method):
    pytest.importorskip(f"trl.scripts.{method}")
    fields = declared_fields(method)
    actions = [*make_parser(method)._actions, *accelerate_launch.launch_command_parser()._actions]
    real = {name_of(flag) for action in actions for flag in action.option_strings if flag.startswith("--")}
    assert {name for name in real if not {name, name.removeprefix("no_")} & {*fields}} <= {"help"}
    assert len({*fields} - real) < 40  # of other classes in the same files


def test_a_split_that_is_not_there_is_named_with_its_field(recipe, tmp_path):
    settings = yaml.safe_load(recipe.read_text()) | {"dataset_name": str(recipe.parent / "data")}
    del settings["datasets"], settings["test_split_size"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    given = ["--config", str(tmp_path / "run.yaml"), "--output_dir", str(tmp_path / "run")]
    with pytest.raises(ValueError, match=r"no split 'dev', which `dataset_test_split` names\. The data has train\."):
        main("dpo", [*given, "--dataset_test_split", "dev"])


@pytest.mark.parametrize("method", ["dpo", "kto", "reward", "sft", "grpo", "rloo"])
def test_data_of_another_kind_are_refused_before_the_model_is_loaded(method, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data").mkdir()
    given = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]
    given += ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path / "run"), "--dry_run"]
    given += ["--reward_funcs", "accuracy_reward"] if method in ("grpo", "rloo") else []
    needed = {"prompt", "solution"} | ({"completion", "label"} if method == "kto" else {"chosen", "rejected", "text"})
    name = "text" if method == "sft" else "prompt"
    cases = [(["words"], "dataset has no column '.*it has .'words'."), (needed, "model"), (needed, f"no '{name}': {{")]
    for columns, message in cases:
        row = {column: True if column == "label" else "a b" for column in columns}
        rows = [row, *([row | {name: None}] if "{" in message else [])]
        (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(ValueError, match=message):
            main(method, given)


def test_a_model_is_looked_for_in_the_cache_if_the_hub_is_offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for path in ("hub/models--gpt2", "hub/models--Qwen--Qwen3-0.6B", "hub/datasets--imdb"):
        (tmp_path / path).mkdir(parents=True)
    for name in ("gpt2", "Qwen/Qwen3-0.6B", "hub"):
        refuse_missing(name, "--model", in_cache=True)
    for name in ("gpt3", "Qwen/Qwen3", "imdb"):
        refuse_missing(name, "--model")
        with pytest.raises(FileNotFoundError, match=f"--model: .*'{name}' here .* no model of this name in the cache"):
            refuse_missing(name, "--model", in_cache=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    refuse_missing("gpt3", "--model", in_cache=True)


@pytest.mark.slow
def test_a_dry_run_prints_one_table_and_writes_nothing(recipe, tmp_path):
    launched = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "trl_padfix.cli.launch"]
    settings = ["--config", str(recipe), "--padding_free", "true", "--output_dir", str(tmp_path / "run")]
    result = run_script(*launched, "dpo", *settings, "--dry_run")
    assert result.stdout.count("Dry run: the first batch, and no step.") == 1
    assert "4 pairs x 1 micro-batch x 2 processes = 8 pairs" in result.stdout
    assert re.search(r"^parity, train, model +parity ok \(padding-free", result.stdout, re.MULTILINE)
    assert re.search(r"^parity, eval, model +parity ok \(padding-free", result.stdout, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_that_fails_is_an_exit_status(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_padfix.trainers.dry_run.dry_run", lambda trainer: False)
    with pytest.raises(SystemExit) as end:
        main("dpo", ["--config", str(recipe), "--dry-run", "--output_dir", str(tmp_path / "run")])
    assert end.value.code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_a_model_of_another_shape_as_the_run_does(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_padfix.trainers.dry_run.dry_run", lambda trainer: True)
    settings = yaml.safe_load(recipe.read_text())
    del settings["model_name_or_path"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings | {"tiny_model": "tiny"}))
    given = ["--config", str(tmp_path / "run.yaml"), "--dry_run", "--output_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="0"):  # the control: it builds the model, and removes it
        main("dpo", given)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / "initial_model" / "files").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"initial_model' exists, and"):
        main("dpo", given)


def test_ctrl_c_is_one_line_that_says_how_to_go_on(recipe, tmp_path, monkeypatch, capsys):
    def interrupted(method, args):
        raise KeyboardInterrupt

    monkeypatch.setattr("trl_padfix.cli.launch.main", interrupted)
    said = []
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            run("dpo", ["--config", str(recipe), "--output_dir", str(tmp_path)])
        assert end.value.code == INTERRUPTED
        said.append(capsys.readouterr().err)
        (tmp_path / "checkpoint-2").mkdir(exist_ok=True)
    assert [text.count("\n") for text in said] == [1, 1]
    assert "before the first checkpoint" in said[0]
    assert "add `--resume_from_checkpoint latest`" in said[1]


def test_a_run_whose_output_is_not_read_ends_without_a_traceback():
    code = "from trl_padfix.cli import launch; launch.main = lambda *_: print('x' * 10**6); launch.run('dpo', [])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 1)


def test_a_single_process_sees_one_gpu(monkeypatch):
    """With several visible GPUs and no launcher around it, it would use `nn.DataParallel`, which is refused."""
    seen = []
    monkeypatch.setattr("trl_padfix.cli.launch.main", lambda *_: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")))
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "3"}, {"LOCAL_RANK": "1"}):
        with patch.dict(os.environ):
            for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"):
                os.environ.pop(name, None)
            os.environ.update(environment)
            run("dpo", [])
    assert seen == ["0", "3", None]


def test_a_signal_to_the_command_alone_ends_the_training(monkeypatch):
    """A supervisor (`docker stop`) signals one process; a shell signals both, so the second Ctrl-C is ignored."""
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleeping) as process:
        monkeypatch.setattr(psutil.Process, "children", lambda self: [process])
        pass_on(signal.SIGTERM, None)
        assert process.wait(30) == -signal.SIGTERM
    interrupt = one_interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT, None)
    interrupt(signal.SIGINT, None)


def test_a_training_that_fails_is_an_exit_status(recipe, monkeypatch):
    def launch_command(args):
        raise subprocess.CalledProcessError(returncode=1, cmd=args.training_script_args)

    monkeypatch.setattr("accelerate.commands.launch.launch_command", launch_command)
    result = trl_padfix_command("dpo", "--config", str(recipe))
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)


def test_flags_of_accelerate_are_taken_from_the_command_line_and_the_yaml(recipe, tmp_path, monkeypatch):
    path = tmp_path / "accelerate.yaml"
    path.write_text("{}")
    monkeypatch.setattr(accelerate_launch, "default_config_file", str(tmp_path / "none.yaml"))
    assert [parse("dpo", ["--config", str(recipe), "--num_processes", n])[1].multi_gpu for n in "12"] == [False, True]
    one = ["--accelerate_config", "single_gpu", "--num_processes", "2", "--dry_run", "true"]
    assert parse("dpo", ["--config", str(recipe), *one])[1].multi_gpu
    args = ["--config", str(recipe), "--accelerate_config", str(path), "--main_process_port", "1234"]
    _, launch = parse("dpo", args)
    assert (launch.num_processes, launch.main_process_port, launch.config_file) == (1, 1234, str(path))
    assert (launch.module, launch.training_script) == (True, "trl_padfix.cli.launch")
    assert launch.training_script_args == ["dpo", *args]
    given = [str(recipe.parent / name) for name in ("model", "data")]
    to_train = ["--accelerate_config", "zero3", "--model_name_or_path", given[0], "--dataset_name", given[1]]
    to_train += ["--use_cpu", "true", "--bf16", "false"]
    _, launch = parse("dpo", to_train)
    assert Path(launch.config_file).name == "zero3.yaml"  # one of TRL's
    grpo = [*to_train, "--reward_funcs", "think_format_reward", "--per_device_train_batch_size", "1"]
    (_, training, *_), _ = parse("grpo", grpo, is_command=True)
    assert training.generation_batch_size == 8  # of the processes that zero3.yaml names
    with pytest.raises(ValueError, match=r"generation_batch_size \(1\) must be divisible by num_generations"):
        parse("grpo", grpo)
