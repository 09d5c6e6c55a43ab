"""Files and model folders as they must not be, for the commands that are given them."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from trl_padfix.tools.tiny import build_qwen2, train_tokenizer


__all__ = ["build_bad_data", "build_bad_models"]

TEXT = '{"text": "alpha beta"}\n'
CHAT = '{"messages": [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"}]}\n'
PAIR = '{"chosen": "Question: a b\\nAnswer: c", "rejected": "Question: a b\\nAnswer: d e"}\n'


def build_bad_data(folder: Path) -> None:
    """Data and YAML files in `folder`."""
    lines = {
        "good.jsonl": TEXT * 12,
        "uneven.jsonl": TEXT + TEXT.replace("beta", "beta alpha beta"),
        "pairs.jsonl": PAIR * 12,
        "corrupt.jsonl": TEXT + '{"text": "b"\n',
        "empty.jsonl": "",
        "blank.jsonl": "\n\n\n",
        "null.jsonl": TEXT * 3 + '{"text": null}\n',
        "null_pairs.jsonl": PAIR * 12 + '{"chosen": "a", "rejected": null}\n',
        "number.jsonl": '{"text": 3}\n{"text": 4}\n',
        "mixed.jsonl": TEXT + '{"text": 4}\n',
        "no_text.jsonl": '{"text": ""}\n' * 3,
        "columns.jsonl": '{"words": "a"}\n',
        "list.jsonl": "[1, 2]\n",
        "no_role.jsonl": '{"messages": [{"content": "x"}]}\n',
        "no_content.jsonl": '{"messages": [{"role": "user", "content": null}]}\n',
        "messages_text.jsonl": CHAT * 3 + '{"messages": "alpha"}\n',
        "no_messages.jsonl": '{"messages": []}\n{"messages": [{"role": "user", "content": "x"}]}\n',
        "plain.json.gz": TEXT,
        "broken.yaml": "a: [1,\n b: :\n",
        "list.yaml": "- a\n- b\n",
        "empty.yaml": "",
        "no_data.yaml": "max_length: 3\n",
        "bad_length.yaml": "dataset_name: {folder}/good_folder\nmax_length: long\n",
        "bad_batch.yaml": "dataset_name: {folder}/good_folder\nper_device_train_batch_size: -1\n",
        "bad_split.yaml": "dataset_name: {folder}/good_folder\ndataset_train_split: nowhere\n",
        "bad_mixture.yaml": "datasets:\n- path: json\n  data_fils: x\n",
        "no_such_mixture.yaml": "datasets:\n- path: json\n  data_files: {folder}/nowhere.jsonl\n",
        "bad_model.yaml": "dataset_name: {folder}/good_folder\nmodel_name_or_path: [1]\n",
        "nonsense.yaml": "dataset_name: {folder}/good_folder\nnonsense: 1\n",
    }  # fmt: skip
    for name, text in lines.items():
        (folder / name).write_text(text.replace("{folder}", str(folder)))
    (folder / "good_folder").mkdir()
    (folder / "good_folder" / "train.jsonl").write_text(TEXT * 12)
    (folder / "empty_folder").mkdir()
    (folder / "folder.jsonl").mkdir()
    noise = random.Random(0).randbytes(1000)
    binary = {
        "binary.jsonl": noise,
        "binary.yaml": noise,
        "binary.json.gz": noise,
        "latin.jsonl": '{"text": "é"}\n'.encode("latin-1"),
        "cut.json.gz": gzip.compress(TEXT.encode() * 1000)[:40],
        "cut.parquet": b"PAR1 and no more",
        "noise.parquet": noise,
    }
    for name, data in binary.items():
        (folder / name).write_bytes(data)


def build_bad_models(folder: Path) -> None:
    """Model folders in `folder`; one of them, `good`, is as it should be."""
    good = folder / "good"
    tokenizer = train_tokenizer(["alpha beta gamma Question Answer"] * 3, 300)
    tokenizer.save_pretrained(good)
    shape = {"layers": 1, "hidden_size": 16, "heads": 2, "kv_heads": 1, "intermediate_size": 16}
    build_qwen2(tokenizer, **shape).save_pretrained(good)
    build_qwen2(tokenizer, **shape, vocab_size=50).save_pretrained(folder / "small_vocabulary")

    def but(name: str, change: Callable[[Path], object]) -> None:
        shutil.copytree(good, folder / name, dirs_exist_ok=True, ignore=lambda _, names: set(names) & there(name))
        change(folder / name)

    def there(name: str) -> set[str]:
        return {path.name for path in (folder / name).glob("*")}

    def config(**fields: object) -> Callable[[Path], object]:
        def change(path: Path) -> None:
            file = path / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | fields))

        return change

    def pickled(path: Path) -> None:
        torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()

    def spoilt(path: Path) -> None:
        weights = load_file(path / "model.safetensors")
        save_file({n: w * float("nan") for n, w in weights.items()}, path / "model.safetensors", {"format": "pt"})

    def without(*names: str) -> Callable[[Path], object]:
        return lambda path: [(path / name).unlink() for name in names]

    def written(name: str, text: str) -> Callable[[Path], object]:
        return lambda path: (path / name).write_text(text)

    but("small_vocabulary", lambda path: None)
    but("no_tokenizer", without("tokenizer.json", "tokenizer_config.json"))
    but("no_weights", without("model.safetensors"))
    but("no_config", without("config.json"))
    but("cut_weights", lambda path: _cut(path / "model.safetensors"))
    but("empty_weights", written("model.safetensors", ""))
    but("pickled_weights", pickled)
    but("nan_weights", spoilt)
    but("other_shape", config(hidden_size=32))
    but("other_type", config(model_type="abacus"))
    but("heads_in_words", config(num_attention_heads="two"))
    but("config_cut", written("config.json", '{"model_type"'))
    but("config_list", written("config.json", "[1]"))
    but("config_empty", written("config.json", "{}"))
    but("tokenizer_empty", written("tokenizer.json", "{}"))
    but("tokenizer_cut", written("tokenizer.json", '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE"'))
    but("tokenizer_config_cut", written("tokenizer_config.json", "nope"))
    but("template_cut", written("chat_template.jinja", "{% for message in %}"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])
