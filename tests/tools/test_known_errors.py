"""The errors that users paste: in the words in which they were printed, or raised on the spot."""

import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
import trl
import yaml
from datasets import Dataset
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from zoo.models import CONFIGS, build

import trl_padfix
from trl_padfix import ParityReport, remove_padding
from trl_padfix.core.attention.attention import packed_attention
from trl_padfix.tools.known_errors import KNOWN_ERRORS, explain, last_error
from trl_padfix.tools.tiny import train_tokenizer


needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="raises what a machine without a GPU raises")
of_today = pytest.mark.skipif(Version(transformers.__version__) < Version("5.15"), reason="raised since 5.15")

PRINTED = yaml.safe_load(Path(__file__).with_name("known_errors.yaml").read_text("utf-8"))


def load(name: str, implementation: str):
    return AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation)


def tokenizer(**settings) -> PreTrainedTokenizerFast:
    made = train_tokenizer(["a few words"], 300)
    return PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, **settings)


def plain() -> PreTrainedTokenizerFast:
    return tokenizer(chat_template="{{ messages[0]['content'] }}")


def differing_report() -> ParityReport:
    return ParityReport(1.0, 2.0, 1e-4, 1e-3, 9, 20, 10, torch.float32, "sdpa", False)


def attend_without_layout() -> None:
    packed_attention(build("qwen2").model.layers[0].self_attn, *[torch.zeros(1, 4, 3, 8)] * 3, None)


def share_embeddings() -> None:
    model, mask = build("qwen2"), torch.ones(2, 3, dtype=torch.int64)
    with remove_padding(model, prefix_sharing=True, strict=True):
        model(inputs_embeds=torch.zeros(2, 3, 32), attention_mask=mask)


def read_beyond_the_vocabulary() -> None:
    model = build("qwen2")
    with remove_padding(model):
        model(torch.tensor([[1, 2, 99]]), attention_mask=torch.tensor([[0, 1, 1]]))


def read_a_model_of_tomorrow() -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text('{"model_type": "abacus"}')
        AutoConfig.from_pretrained(folder)


RAISED: dict[str, list[Callable]] = {
    "FlashAttention is not installed": [
        lambda: load("qwen2", "flash_attention_2")
    ],
    "Hub kernels are not installed": [
        lambda: load("qwen2", "kernels-community/flash-attn2")
    ],
    "attention that the model does not have": [
        lambda: load("gpt_oss", "sdpa")
    ],
    "no pad token": [lambda: tokenizer()(["a", "a few"], padding=True)],
    "no chat template": [lambda: tokenizer().apply_chat_template([{"role": "user", "content": "a"}])],
    "NaN": [lambda: torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)],
    "an id beyond the vocabulary": [
        lambda: torch.nn.Embedding(4, 2)(torch.tensor([5])),
        read_beyond_the_vocabulary,
    ],
    "the packed forward differs": [lambda: differing_report().raise_if_failed()],
    "padding cannot be removed": [lambda: remove_padding(build("qwen2", "flex_attention"))],
    "prefix sharing without packing": [
        lambda: trl_padfix.DPOConfig(prefix_sharing=True, use_cpu=True, bf16=False, report_to=[])
    ],
    "prefix sharing and more than ids": [share_embeddings],
    "the layout did not arrive": [attend_without_layout],
    "weights on the meta device": [lambda: torch.nn.Linear(1, 1, device="meta").to("cpu")],
    "rows that do not fit one table": [lambda: Dataset.from_list([{"content": "a"}, {"content": ["a"]}])],
    "a column that the trainer looks for": [lambda: trl.apply_chat_template({"question": []}, tokenizer())],
    "an argument that moved to the configuration": [
        lambda: trl.DPOTrainer("model", beta=0.1),
        lambda: trl_padfix.DPOTrainer("model", beta=0.1),
    ],
    "a field that TRL does not have any more": [lambda: trl.DPOConfig(beat=0.1)],
    "a model that transformers does not know": [read_a_model_of_tomorrow],
    "adapters of a newer PEFT": [lambda: import_module("peft").LoraConfig(field_of_tomorrow=None)],
    "a name that transformers does not have": [lambda: exec("from transformers import AutoModelOfTomorrow")],
    "a name that TRL does not have": [lambda: exec("from trl import TrainerOfTomorrow")],
}  # fmt: skip


RAISED_NOW: dict[str, Callable] = {
    "an attribute that a configuration does not have": lambda: LlamaConfig().rope_theta,
    "TRL older than transformers": lambda: build("qwen2").warnings_issued,
    "a chat template that does not mark the assistant": lambda: trl.get_training_chat_template(plain()),
    "a chat template that TRL cannot parse": lambda: trl.add_response_schema(plain()),
    "fields that transformers 5 removed": lambda: trl.DPOConfig(warmup_ratio=0.1),
    "special tokens in a list": lambda: plain()._set_model_specific_special_tokens(["<x>"]),
}
"""Of today's transformers and TRL."""


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in PRINTED.items() for text in texts])
def test_an_error_that_was_printed_is_explained(name, text):
    assert [error.name for error in explain(text)] == [name]


@needs_cpu
@pytest.mark.parametrize(
    ("name", "fail"),
    [(name, fail) for name, calls in RAISED.items() for fail in calls]
    + [pytest.param(name, fail, marks=of_today) for name, fail in RAISED_NOW.items()],
)
def test_an_error_that_is_raised_is_explained(name, fail):
    with pytest.raises(Exception) as error:  # noqa: PT011 - of any kind
        fail()
    printed = "".join(traceback.format_exception(error.value))
    assert name in [known.name for known in explain(printed)]
    assert last_error(printed).startswith((error.type.__name__, f"{error.type.__module__}."))


UNRELATED = (
    "ZeroDivisionError: division by zero",
    "KeyError: 'user_id'",
    "ModuleNotFoundError: No module named 'pandas'",
    "AttributeError: 'list' object has no attribute 'keys'",
    "AttributeError: 'AppConfig' object has no attribute 'port'",
    "TypeError: AppConfig.__init__() got an unexpected keyword argument 'port'",
    "ImportError: cannot import name 'load' from 'transform' (/home/me/transform.py)",
    "FileNotFoundError: [Errno 2] No such file or directory: 'train.py'",
    "psycopg2.OperationalError: could not connect to server: Connection refused",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "ValueError: could not convert string to float: 'NaN '",
    "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    "RuntimeError: dictionary changed size during iteration",
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
)


@pytest.mark.parametrize("text", UNRELATED)
def test_an_unrelated_error_is_not_explained(text):
    assert explain(text) == []
    frames = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    trainer.train()\n'
    assert explain(frames + text) == []
    assert last_error(f"{frames}{text}\n") == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DPOTrainer.__init__() got an unexpected keyword argument 'max_length'", "is a field of `DPOConfig`"),
        ("KTOTrainer.__init__() got an unexpected keyword argument 'beta'", "args=KTOConfig(beta=...)"),
        ("SFTTrainer.__init__() got an unexpected keyword argument 'padding_free'", "is a field of `SFTConfig`"),
        ("SFTTrainer.__init__() got an unexpected keyword argument 'max_seq_length'", "nearest fields: `max_length`"),
        ("DPOConfig.__init__() got an unexpected keyword argument 'train_dataset'", "is an argument of `DPOTrainer`"),
        ("DPOConfig.__init__() got an unexpected keyword argument 'lerning_rate'", "nearest fields: `learning_rate`"),
        ("SFTConfig.__init__() got an unexpected keyword argument 'num_generations'", "`GRPOConfig`, `RLOOConfig`"),
        ("TrainingArguments.__init__() got an unexpected keyword argument 'max_length'", "`SFTConfig`"),
        ("cannot import name 'ORPOTrainer' from 'trl'", "from trl.experimental.orpo import ORPOTrainer"),
        ("cannot import name 'ORPOTrainer' from 'trl_padfix'", "from trl.experimental.orpo import ORPOTrainer"),
        ("cannot import name 'DPOTrainer' from 'trl' (unknown location)", "is there a folder or file `trl` beside"),
        ("cannot import name 'TrainerOfTomorrow' from 'trl'", "The TRL that is installed here has it nowhere."),
    ],
)  # fmt: skip
def test_it_is_said_where_an_argument_belongs_by_what_is_installed(text, said):
    [error] = explain(text)
    known = next(known for known in KNOWN_ERRORS if known.name == error.name)
    assert said in error.fix.removesuffix(known.fix)


def test_packages_that_do_not_import_leave_the_explanation_general(monkeypatch):
    monkeypatch.setitem(trl_padfix._HOME, "BrokenConfig", "core.layout.broken")
    [error] = explain("TypeError: DPOTrainer.__init__() got an unexpected keyword argument 'beta'")
    assert error in KNOWN_ERRORS


def test_every_known_error_is_tried():
    names = [error.name for error in KNOWN_ERRORS]
    assert len(names) == len(set(names))
    assert set(names) == PRINTED.keys() | RAISED.keys()
    assert all(error.cause.endswith((".", "numbers.")) and error.fix for error in KNOWN_ERRORS)
