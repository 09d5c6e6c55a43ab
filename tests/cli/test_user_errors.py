"""Mistakes of the user: a message, an exit code, nothing written. Accidents: their own traceback."""

import ast
from pathlib import Path

import pytest
from datasets import Dataset
from kit.bad_inputs import build_bad_data, build_bad_models
from kit.commands import trl_padfix_command
from safetensors import safe_open

from trl_padfix.cli import user_errors
from trl_padfix.cli.config_file import PACKAGES, _types, check_given, read_given


CPU = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
MODEL = [*CPU, "--model_name_or_path", "models/good"]
RUN = [*MODEL, "--dataset_name", "pairs_folder"]
TEXTS = [*MODEL, "--dataset_name", "good_folder"]
PROMPTS = [*MODEL, "--dataset_name", "prompts_folder"]

SHARED = [*RUN, "--padding_free", "--prefix_sharing"]
WRONG = "gradient_accumulation_steps=-1 packed_multiple_of=0 adam_beta1=1 seed=4294967296"


def stats(data, *more):
    return ["stats", data, "--train-tokenizer", "300", *more]


CASES = [
    (["stats", "nowhere.jsonl"], "there is no file or folder 'nowhere.jsonl'"),  # before the missing tokenizer
    (["stats", "good.jsonl"], "Give one of `--tokenizer` and `--train-tokenizer`"),
    (stats("empty.jsonl"), "a data file has no row"),
    (stats("corrupt.jsonl"), "(JSON parse error: Missing a comma"),
    (stats("null.jsonl"), "Row 3 (counted from 0) of the null.jsonl dataset has no 'text': {'text': None}. Write a"),
    (stats("columns.jsonl"), "The data has the columns words. This command counts dpo: chosen, rejected;"),
    (stats("pairs.jsonl", "--max-length", "1"), "no row is left"),
    (stats("good.jsonl", "--batch_size", "0"), "Invalid value for '--batch-size'"),
    (["dpo"], "Set `--model_name_or_path` to a folder or a Hub id"),
    (["dpo", *CPU, "--config"], "`--config` needs the path of one YAML"),
    (["dpo", *CPU, "--config", "broken.yaml"], "found character '\\t' that cannot start any token (line 2). Indent"),
    (["dpo", *MODEL], "No dataset: set `--dataset_name`"),
    (["dpo", *CPU, "--model_name_or_path", "./nowhere"], "--model_name_or_path: there is no file or folder"),
    (["dpo", *CPU, "--model_name_or_path", "no/model"], "no model of this name in the cache of the Hub"),
    (["dpo", *CPU, "--padding_freee", "true", "--nonsens=1"], "--padding_freee (did you mean `padding_free`?)"),
    (["dpo", *CPU, "--learning-rate", "abc"], "--learning-rate: invalid float value: 'abc'"),
    (["dpo", *CPU, "--gradient_checkpointing", "maybe"], "--gradient_checkpointing: invalid bool value: 'maybe'"),
    (["dpo", *CPU, "--max_length", "None"], "invalid int value: 'None'. Write `null`"),
    (["dpo", *RUN, "--tiny_model", "tiny"], "(not both)"),
    (["dpo", *CPU, "--model_name_or_path", "hollow"], "the folder 'hollow' has no config.json. Name another"),
    (["dpo", *CPU, "--model_name_or_path", "."], "the folder '.' has no config.json. Merge the adapter into a model."),
    (["dpo", *CPU, "--resume_from_checkpoint", "nowhere"], "'nowhere' is no checkpoint. Name one, or write `lat"),
    (["dpo", *CPU, "--resume_from_checkpoint", "latest"], "there is no complete checkpoint in 'trainer_output'"),
    (["dpo", *RUN, "--resume_from_checkpoint", "--seed", "1"], "--resume_from_checkpoint needs a value"),
    (["dpo", *RUN, "--config", "twice.yaml"], "the key `seed` appears in lines 1 and 3"),
    (["grpo", *PROMPTS, "--config", "a_word.yaml"], "line 1: reward_funcs: write a list: `reward_funcs: [length]`"),
    (["grpo", *PROMPTS], "No reward: set `--reward_funcs`"),
    (["trainn"], "trainn"),
]

EARLY = [
    (["dpo", "no.yaml", *CPU], "Unexpected argument `no.yaml`. To read a YAML file, write `--config no.yaml`"),
    (["dpo", "-config", "no.yaml"], "-config: a flag begins with two dashes: `--config`"),
    (["dpo", *RUN, "--attn_implementation", "flash_attn2"], "'flash_attn2' (choose from 'auto', 'eager', 'flash_"),
    (["dpo", *RUN, "--config", "no_files.yaml"], "no_files.yaml, line 1: datasets, entry 1: Unable to find '"),
    (["dpo", *RUN, "--config", "empty.yaml"], "line 2: beta: invalid float value: None. Write a value, or"),
    (["dpo", *RUN, "--prefix_sharing"], "--prefix_sharing: it needs `padding_free: true`. Set both, or neither."),
    (["dpo", *RUN, "--prefix_sharing", "maybe"], "invalid choice: 'maybe' (choose from 'auto', 'false', 'true')"),
    (["sft", *TEXTS, "--config", "no.yaml"], "'no', 'steps'). YAML takes `no` for false. Write \"no\" in quotes"),
    (["dpo", *RUN, "--config", "no_field.yaml"], "no_remove_unused_columns (write `remove_unused_columns: false`)"),
    (["dpo", *RUN, "--accelerate_config", "zero33"], "invalid choice: 'zero33' (choose from 'fsdp1', "),
    (["dpo", *RUN, "--env", "X=1"], "`env` works only in a YAML"),
    (["dpo", *RUN, "--attn_implementation", "flash_attention_2"], "'flash_attention_2' needs a GPU"),
    (["dpo", *TEXTS], "no column 'chosen' and no column 'rejected'; it has ['text']. DPO needs `chosen`"),
    (["sft", *TEXTS, "--dataset_text_field", "txt"], "no column 'txt'; it has ['text']. SFT needs `txt`"),
    (["kto", *MODEL, "--config", "slice.yaml"], "no column 'completion' and no column 'label' and no column 'prompt'"),
    (["dpo", *MODEL, "--config", "entry.yaml"], "entry 1 has no field `data_file` (did you mean `data_files`?)"),
    (["dpo", *MODEL, "--config", "loader.yaml"], "cannot load 'jsonl' by this name. In a YAML (`--config`) w"),
    (["dpo", *MODEL, "--config", "no_list.yaml"], "line 1: datasets: in a YAML write `datasets: [{path: json"),
    (["dpo", *MODEL, "--datasets", "good.jsonl"], "--datasets: in a YAML write `datasets: [{path: json"),
    (["dpo", *RUN, "--eval_strategy", "steps"], "(or `test_split_size` with `datasets`): Bad split: test. Avail"),
    (["dpo", *MODEL, "--config", "mixture.yaml"], "line 1: datasets, entry 2: The good.jsonl dataset has no column '"),
    (["dpo", *MODEL, "--config", "no_row.yaml"], "entry 1: empty.jsonl or a file in it has no row."),
    (["dpo", *MODEL, "--config", "kinds.yaml"], "entry 2: The first row of chats.jsonl has [{'content': 'a', 'role"),
    (["dpo", *MODEL, "--config", "kinds.yaml", "--eval_strategy", "steps"], "datasets: it has no split 'test' to ev"),
    (["dpo", *CPU, "--config", "seven.yaml"], 'model_name_or_path: invalid str value: 7. Write "7" in quotes.'),
    (["dpo", *RUN, "--output_dir", "/proc/run"], "`output_dir`: '/proc/run' cannot be written: '/proc' is a file or"),
    (["rloo", *PROMPTS, "--rloo_k", "2"], "--rloo_k (it is `num_generations` now)"),
    (["dpo", *RUN, "--max_completion_length", "9"], "(it is `max_length` here, of prompt and completion)"),
    (["grpo", *PROMPTS, "--reward_funcs", "rewards.bad"], "--reward_funcs: there is no 'bad' in rewards.py. Your"),
    (["grpo", *PROMPTS, "--reward_funcs", "mine.good"], "--reward_funcs: there is no module 'mine' here ("),
    (["grpo", *PROMPTS, "--reward_funcs", "accuracy"], "there is no 'accuracy' in TRL, which has accuracy_reward, "),
    (["dpo", *RUN, "--test_split_size", "0"], "--test_split_size: it must be between 0 and 1, or in a YAML"),
    (["dpo", *RUN, "--report_to", "wandb", "none"], "invalid choice: ['wandb', 'none'] (choose from 'all', 'azur"),
    (stats("rows.txt"), "DATA: 'rows.txt' is a file of a type that is not read. Name a folder, or data as .jsonl"),
    (["dpo", *MODEL, "--config", "columns.yaml"], "line 1: datasets, entry 1: `columns` is a list of names: write `c"),
    (["dpo", *MODEL, "--config", "third.yaml"], "has no column '3'; it has ['chosen', 'rejected']. Correct `columns`"),
    (["dpo", *MODEL, "--config", "half.yaml"], "line 1: datasets, entry 1: fraction: invalid float value: 'half'."),
    (["dpo", *RUN, "--config", "cosim.yaml"], "there is no file 'cosim.yaml' (did you mean `cosin.yaml`?) here (/"),
    (["dpo", *RUN, "--run_name", "my", "run"], "--run_name: invalid text value: ['my', 'run']."),
    (["dpo", *RUN, "—padding_free"], "invalid str value: ['pairs_folder', '—padding_free']. Write one value. A flag"),
    (["dpo", *RUN, "--model_init_kwargs", "7"], "_kwargs: invalid dict value: '7'. Write {\"NAME\": VALUE}; in a sh"),
    (["dpo", *RUN, "--use_liger_kernel"], "--use_liger_kernel: run `pip install no_kernel`, which it needs."),
    (["dpo", *MODEL, "--dataset_name", "disk"], "write `datasets: [{path: arrow, data_files: disk/*.arrow}]`"),
    (["distillation", *PROMPTS], "No teacher: set `--teacher_model_name_or_path`"),
    (["ORPO", *RUN], "No command 'orpo'. In Python: `from trl_padfix.experimental.orpo import ORPOTrainer`."),
    (["dpo", *RUN, "--config_file", "list.yaml"], "list.yaml is not a mapping of fields to values"),
    (["dpo", *RUN, "--config_file", "typo.yaml"], "typo.yaml, line 2: num_proces (did you mean `num_processes`?)"),
    (["dpo", *RUN, "--accelerate_config", "./kind.yaml"], "distributed_type: invalid choice: 'MULTI_GPUU' (choose"),
    (["dpo", *RUN, "--loss_type", "sft", "sigmod"], "--loss_type: invalid choice: 'sigmod' (choose from '"),
    *((["dpo", *RUN, f"--{flag}"], f"--{flag.split('=')[0]}: it must be at least ") for flag in WRONG.split()),
    (["dpo", *RUN, "--num_train_epochs=0"], "--num_train_epochs: it must be above 0, got 0."),
    (["dpo", *RUN, "--bf16", "--fp16"], "--fp16: `bf16` is true too. Set one of them to false."),
    (["dpo", *RUN, "--lora_target_modules", "q_proj,v_proj"], "got 'q_proj,v_proj', write '.*(q_proj|v_proj)'."),
    (["dpo", *MODEL, "--dataset_name", "C:\\data"], "'C:\\\\data' here (/"),
    (["grpo", *PROMPTS, "--reward_funcs", "accuracy_reward"], "no column 'solution'; it has ['prompt']. The accuracy"),
    (["dpo", *RUN, "--bf16=1", "--use_cpu=0"], "2.9.0+cpu has no GPU: for bf16 (the default) set `--use_cpu true`"),
    (["dpo", *RUN, "--eval_on_start"], "--eval_on_start: it needs `eval_strategy: steps` or `epoch`."),
    (["dpo", *RUN, "--load_best_model_at_end"], "`save_strategy` (steps) and `eval_strategy` (no) must be the same"),
    (["dpo", *RUN, "--f_divergence_type", "js"], "invalid choice: 'js' (choose from 'alpha_divergence', 'forward_kl"),
    (["sft", *TEXTS, "--padding_free", "--group_by_prefix"], "--group_by_prefix: it needs `prefix_sharing: true`."),
    (["sft", *TEXTS, "--chat_template_path", "a.jinja"], "--chat_template_path: there is no file or folder 'a.jinja'"),
    (["dpo", *RUN, "--lora_r", "8"], "--lora_r: it has no effect without `use_peft: true`. Set both, or neither."),
    (["dpo", *RUN, "--use_lora", "true"], "--use_lora (it is `use_peft` here)"),
    (["stats", "good.jsonl", "--tokenizer", "hollow"], "--tokenizer: the folder 'hollow' has no tokenizer.json or"),
]
"""Mistakes that are said before anything that takes seconds is imported."""


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    build_bad_data(folder)
    build_bad_models(folder / "models")
    (folder / "a_word.yaml").write_text("reward_funcs: length\n")
    (folder / "no.yaml").write_text("save_strategy: no\n")
    (folder / "no_field.yaml").write_text("no_remove_unused_columns: true\n")
    (folder / "empty.yaml").write_text("seed: 1\nbeta:\n")
    (folder / "cosin.yaml").write_text("lr_scheduler_type: cosin\n")
    (folder / "slice.yaml").write_text("datasets: [{path: json, data_files: good.jsonl, split: 'train[:2]'}]\n")
    (folder / "entry.yaml").write_text("datasets: [{path: json, data_file: good.jsonl}]\n")
    (folder / "loader.yaml").write_text("datasets: [{path: jsonl, data_files: good.jsonl}]\n")
    mixture = "datasets: [{path: json, data_files: pairs.jsonl}, {path: json, data_files: NAME.jsonl}]"
    (folder / "mixture.yaml").write_text(mixture.replace("NAME", "good"))
    (folder / "kinds.yaml").write_text(mixture.replace("NAME", "chats"))
    (folder / "no_row.yaml").write_text("datasets: [{path: json, data_files: empty.jsonl}]\n")
    (folder / "seven.yaml").write_text("model_name_or_path: 7\n")
    (folder / "no_list.yaml").write_text("datasets: {path: json}\n")
    (folder / "twice.yaml").write_text("seed: 1\nmax_steps: 2\nseed: 2\n")
    (folder / "no_files.yaml").write_text("datasets: [{path: json, data_files: [good.jsonl, '*.jsonl', a/b/c]}]\n")
    (folder / "rewards.py").write_text("def good(completions, **kwargs):\n    0\n")
    Dataset.from_dict({"chosen": ["a"], "rejected": ["b"]}).save_to_disk(folder / "disk")
    (folder / "rows.txt").write_text("alpha\n")
    for name, more in {
        "columns": "columns: chosen",
        "third": "columns: [chosen, 3]",
        "half": "fraction: half",
    }.items():
        (folder / f"{name}.yaml").write_text(f"datasets: [{{path: json, data_files: pairs.jsonl, {more}}}]\n")
    (folder / "typo.yaml").write_text("distributed_type: MULTI_CPU\nnum_proces: 2\n")
    (folder / "kind.yaml").write_text("distributed_type: MULTI_GPUU\n")
    (folder / "hollow").mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(material, monkeypatch):
    monkeypatch.chdir(material)
    monkeypatch.delenv(user_errors.DEBUG, raising=False)


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def assert_said(cases):
    for args, message in cases:
        result = trl_padfix_command(*args)
        assert result.exit_code in (1, 2), (args, result.output, result.exception)  # 2 is click's, for its own options
        assert isinstance(result.exception, SystemExit), args
        assert message in result.output, args
        assert "Traceback" not in result.output, args


def test_a_mistake_is_a_message_and_an_exit_code(material):
    before = files(material)
    assert_said(CASES)
    assert files(material) == before


def test_a_mistake_is_said_before_what_takes_seconds(monkeypatch):
    monkeypatch.setattr("trl_padfix.cli.config_file.installed_version", lambda package: "2.9.0+cpu")
    monkeypatch.setattr("trl_padfix.cli.launch.make_parser", None)
    monkeypatch.setattr("trl_padfix.cli.stats.require", None)
    monkeypatch.setitem(PACKAGES, "use_liger_kernel", "no_kernel")
    assert_said(EARLY)


def test_right_values_of_these_fields_pass(monkeypatch):
    args = [*RUN[:-2], "--loss_type", "sigmoid", "sft", "--num_train_epochs", "0.5", "--max_steps=-1", "--lora_r=8"]
    args += ["--padding_free", "--prefix_sharing=auto", "--group_by_prefix", "--optim_args=eps=1e-6,betas=x"]
    args += ["--load_best_model_at_end", "--save_strategy=best", "--use_peft=false", "--dataset_name", "pairs_folder"]
    args += ["--model_init_kwargs", '{"a": {"b": true}}']
    assert check_given("dpo", read_given(args)) is None
    for template in ("rows.txt", "models/good"):
        assert check_given("sft", read_given([*TEXTS, "--chat_template_path", template])) is None
    monkeypatch.setenv("TRL_PADFIX_OFF", "1")
    args += ["--prefix_sharing", "--lora_target_modules=.*_proj", "--packed_multiple_of", "64", "128"]
    assert check_given("dpo", read_given(args)) is None


def test_types_are_read_from_annotations_of_old_and_new_releases():
    enums = {"Steps": {"'no'", "'steps'"}}
    cases = {
        "x: Optional[int] = None": {"int", "None"},
        "x: int | None = None": {"int", "None"},
        "x: Union[Steps, str] = 'no'": {"'no'", "'steps'"},
        "x: str | None = field(metadata={'choices': ['a', 'b']})": {"'a'", "'b'", "None"},
    }
    assert {source: _types(ast.parse(source).body[0], enums) for source in cases} == cases


def test_debug_shows_the_traceback():
    result = trl_padfix_command(*stats("nowhere.jsonl"), env={user_errors.DEBUG: "1"})
    assert isinstance(result.exception, FileNotFoundError)


def test_an_accident_keeps_its_traceback(monkeypatch):
    def broken(*args, **kwargs):
        return {}["logits"]

    monkeypatch.setattr("trl_padfix.tools.stats.measure", broken)
    result = trl_padfix_command(*stats("good.jsonl"))
    assert result.exit_code == 1
    assert isinstance(result.exception, KeyError)


def test_errors_of_packages_that_check_keep_their_own_words(capsys):
    from transformers import TrainingArguments

    with pytest.raises(SystemExit), user_errors.explain_errors("trl-padfix dpo"):
        TrainingArguments("x", load_best_model_at_end=True, use_cpu=True)
    said = capsys.readouterr().err
    assert said.startswith("trl-padfix dpo: ")
    assert "save and eval strategy to match" in said
    Path("cut.safetensors").write_bytes(Path("models/good/model.safetensors").read_bytes()[:1000])
    with pytest.raises(SystemExit), user_errors.explain_errors("trl-padfix dpo"):
        safe_open("cut.safetensors", "pt")
    assert "is cut off or damaged" in capsys.readouterr().err
    with pytest.raises(ValueError, match="invalid literal"), user_errors.explain_errors("trl-padfix dpo"):
        int("x")  # nobody's `raise`
