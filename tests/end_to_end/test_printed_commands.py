"""Commands that pages, messages and tools print: each runs, or is named with the reason why it does not."""

import re
import shlex
from contextlib import redirect_stdout
from io import StringIO

import bench
import pytest
from datasets import load_dataset
from kit.cells import slow_but
from kit.commands import build_pairs, trl_padfix_command
from kit.printed import ROOT, everywhere, of_text

from trl_padfix.cli.methods import METHODS


COMMANDS = [command for command in everywhere() if "{" not in command]
"""All but those of messages in which something is put."""

STAND_FOR = {  # what a reader puts in
    r"\bDATA(?=.* --expand-turns)": "recipes/data/airline/rollouts.jsonl.gz",
    r"\bDATA\b": "recipes/data/preferences",
    r"(--model|--tokenizer|--model_name_or_path) ID": r"\1 model",
    r"\b(FILE|run\.yaml)\b(?! --model)": "figures",
    r"--config (FILE|figures)": "--config recipes/dpo_tiny.yaml",
    r"nproc-per-node N": "nproc-per-node 2",
    r"<a CPU index>": "INDEX",
    r"\btrain\.py": "recipes/dpo.py",  # the script of the DPO guide
    r"\$\(\(.+?\)\)|\$[A-Z_]+": "2",  # SLURM's
    r"(--resume_from_checkpoint) latest": r"\1 false",  # nothing was trained here
}
TINY = {  # what stands for what a test has not: the Hub, a GPU, time
    r"Qwen/Qwen2\.5-[\w.]+-Instruct": "model",
    r"--device cuda --dtype \w+ --shape 0\.5b": "--shape tiny --pairs 2 --steps 1 --warmup 0 --data lengths:20/6",
    r"[\w-]*test\.jsonl\.gz": "pairs.jsonl",
    r"lengths:\d+/\d+": "lengths:20/6",
    r"(?<=bench\.py)(?!.*--device)": " --device cpu",
    r"--shape hybrid": "--shape hybrid-tiny",
    r"(?<=bench\.py)(?!.*--shape)": " --shape tiny",
    r"(?<=bench\.py)(?!.*--warmup)": " --warmup 1",
    r"(?<=bench\.py)(?!.*--pairs)": " --pairs 2",
    r"(?<=bench\.py)(?!.*--steps)": " --steps 2",
    r"--max-length \d{5}": "--max-length 2048",
    r"--(steps|pairs|batch-size) \d+": r"--\1 2",
    r"--train-tokenizer \d+": "--train-tokenizer 300",
}
NOT_RUN = {
    r"pip install ": "brings packages from an index",
    r"(pytest|nox) ": "the tests, which CI runs",
    r"accelerate launch|python recipes/": "test_recipes.py and test_guides.py train with these scripts",
    r"trl-padfix .*(Qwen|qwen|llama|rollouts\.jsonl )": "uses the Hub",
    rf"trl-padfix ({'|'.join(METHODS)})\b": "test_recipes.py trains with each; test_launch.py has the flags",
    r"python benchmarks/(gpu|layout_time)|torchrun|\w+=\S+ (python|torchrun)": "measures for minutes",
    r"python (docs/\w+\.py|tests/)": "writes files of the repository; `--check` is run by .ci/run",
    r"python conformance/": "test_conformance.py",
    r"python -m trl_padfix": "as `trl-padfix`; test_llamafactory.py runs the plug-in where its stack is",
}


def filled(command: str, *tables: dict[str, str]) -> str:
    for table in tables:
        for shown, here in table.items():
            command = re.sub(shown, here, command)
    return command


def is_run(command: str) -> bool:
    """Whether it is more than the name of a command, and none of those that are not run."""
    words = command.split()
    if words[:2] == ["python", "benchmarks/bench.py"]:
        return len(words) > 2
    named = words[0] == "trl-padfix" and (len(words) < 3 or (len(words) == 3 and words[2].startswith("-")))
    return not named and not any(re.match(pattern, command) for pattern in NOT_RUN)


def kind_of(command: str) -> tuple[str, ...]:
    """What a command does, without the sizes: of a kind one is run."""
    return tuple(re.findall(r"stats|doctor|--(?:trainer|data|shape|plot|json|model)\b ?\w*|--expand-turns", command))


RUN = {command: tiny for command in COMMANDS if is_run(tiny := filled(command, STAND_FOR, TINY))}
ONE_OF_A_KIND = sorted({kind_of(tiny): tiny for tiny in RUN.values()}.values())
FAST = ("doctor", "python benchmarks/bench.py --pairs 2 --warmup 1 --shape tiny")


@pytest.fixture(scope="module")
def here(tiny_model, tmp_path_factory):
    """A folder like a clone: with the recipes, a tiny model, and pairs in the format of HH-RLHF."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    chats = load_dataset(str(ROOT / "recipes/data/preferences"), split="train[:80]")
    (folder / "model").symlink_to(tiny_model)
    chats.to_json(folder / "chats.jsonl")
    build_pairs(64).to_json(folder / "pairs.jsonl")
    (folder / "accelerate.yaml").write_text((ROOT / "recipes/accelerate/cpu.yaml").read_text())
    return folder


def run(command: str, here, monkeypatch) -> str:
    monkeypatch.chdir(here)
    if command.startswith("python benchmarks/bench.py"):
        with redirect_stdout(StringIO()) as printed:
            bench.main(shlex.split(command)[2:])
        assert "equal in all variants" in printed.getvalue()
        return printed.getvalue()
    result = trl_padfix_command(*shlex.split(command)[1:], env={"HF_HUB_OFFLINE": "1"})
    assert result.exit_code == 0, f"{command}\n{result.output}"
    return result.output


WRITTEN = [
    ("Run `trl-padfix doctor --json x` first.", "trl-padfix doctor --json x"),
    ("Counted by (`PYTHONPATH=tests python a.py`).", "PYTHONPATH=tests python a.py"),
    ("On Kaggle `!accelerate launch a.py`", "accelerate launch a.py"),
    ("if None:\n    %pip install --quiet x  # on Colab", "pip install --quiet x"),
    ("$ HF_HUB_OFFLINE=1 trl-padfix dpo --config a", "HF_HUB_OFFLINE=1 trl-padfix dpo --config a"),
    ("#   trl-padfix dpo --config a", "trl-padfix dpo --config a"),
    ("Measure it: python bench.py --data a.b", "python bench.py --data a.b"),
    ("srun bash -c 'accelerate launch --num_machines $N \\\n  a.py'", "accelerate launch --num_machines $N a.py"),
]


def test_a_command_is_found_however_it_is_written():
    for text, command in WRITTEN:
        assert command in of_text(text)


def test_there_are_commands_and_none_is_left_out_in_vain():
    assert RUN
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command) for command in COMMANDS), pattern
    for pattern in TINY:
        assert any(re.search(pattern, filled(command, STAND_FOR)) for command in RUN), pattern


@pytest.mark.parametrize(
    "command", slow_but([c for c in ONE_OF_A_KIND if c.removeprefix("trl-padfix ").startswith(FAST)], ONE_OF_A_KIND)
)
def test_a_command_runs(command, here, monkeypatch):
    run(command, here, monkeypatch)
