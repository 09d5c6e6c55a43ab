"""Files and model folders as they must not be, for the commands that are given them."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from trl_padfix.tools.tiny import build_qwen2, train_tokenizer


__all__ = ["build_bad_data", "build_bad_models"]

TEXT = '{"text": "alpha beta"}\n'
PAIR = '{"chosen": "Question: a b\\nAnswer: c", "rejected": "Question: a b\\nAnswer: d e"}\n'


def build_bad_data(folder: Path) -> None:
    """Data and YAML files in `folder`."""
    lines = {
        "good.jsonl": TEXT * 12,
        "uneven.jsonl": TEXT + TEXT.replace("beta", "beta alpha beta"),
        "pairs.jsonl": PAIR * 12,
        "corrupt.jsonl": TEXT + '{"text": "b"\n',
        "empty.jsonl": "",
        "null.jsonl": TEXT * 3 + '{"text": null}\n',
        "null_pairs.jsonl": PAIR * 12 + '{"chosen": "a", "rejected": null}\n',
        "no_text.jsonl": '{"text": ""}\n' * 3,
        "columns.jsonl": '{"words": "a"}\n',
        "no_role.jsonl": '{"messages": [{"content": "x"}]}\n',
        "plain.json.gz": TEXT,
        "broken.yaml": "a: [1,\n b: :\n",
        "list.yaml": "- a\n- b\n",
        "no_data.yaml": "max_length: 3\n",
        "bad_length.yaml": "dataset_name: {folder}/good_folder\nmax_length: long\n",
        "bad_batch.yaml": "dataset_name: {folder}/good_folder\nper_device_train_batch_size: -1\n",
        "bad_split.yaml": "dataset_name: {folder}/good_folder\ndataset_train_split: nowhere\n",
        "bad_mixture.yaml": "datasets:\n- path: json\n  data_fils: x\n",
        "bad_model.yaml": "dataset_name: {folder}/good_folder\nmodel_name_or_path: [1]\n",
        "nonsense.yaml": "dataset_name: {folder}/good_folder\nnonsense: 1\n",
    }  # fmt: skip
    for name, text in lines.items():
        (folder / name).write_text(text.replace("{folder}", str(folder)))
    (folder / "good_folder").mkdir()
    (folder / "good_folder" / "train.jsonl").write_text(TEXT * 12)
    (folder / "empty_folder").mkdir()
    (folder / "folder.jsonl").mkdir()
    binary = {
        "latin.jsonl": '{"text": "é"}\n'.encode("latin-1"),
        "cut.json.gz": gzip.compress(TEXT.encode() * 1000)[:40],
        "cut.parquet": b"PAR1 and no more",
    }
    for name, data in binary.items():
        (folder / name).write_bytes(data)


def build_bad_models(folder: Path) -> None:
    """Model folders in `folder`; one of them, `good`, is as it should be."""
    good, weights_file, config_file = folder / "good", "model.safetensors", "config.json"
    tokenizer = train_tokenizer(["alpha beta gamma Question Answer"] * 3, 300)
    shape = {"layers": 1, "hidden_size": 16, "heads": 2, "kv_heads": 1, "intermediate_size": 16}
    for path, more in {good: {}, folder / "small_vocabulary": {"vocab_size": 50}}.items():
        build_qwen2(tokenizer, **shape, **more).save_pretrained(path)
        tokenizer.save_pretrained(path)
    config, weights = json.loads((good / config_file).read_text()), load_file(good / weights_file)
    torch.save(weights, pickled := io.BytesIO())
    spoilt = save({name: weight * float("nan") for name, weight in weights.items()}, {"format": "pt"})
    changes: dict[str, dict[str, str | bytes | None]] = {
        "no_tokenizer": {"tokenizer.json": None, "tokenizer_config.json": None},
        "no_weights": {weights_file: None},
        "no_config": {config_file: None},
        "cut_weights": {weights_file: (good / weights_file).read_bytes()[:-100]},
        "empty_weights": {weights_file: ""},
        "pickled_weights": {weights_file: None, "pytorch_model.bin": pickled.getvalue()},
        "nan_weights": {weights_file: spoilt},
        "other_shape": {config_file: json.dumps(config | {"hidden_size": 32})},
        "other_type": {config_file: json.dumps(config | {"model_type": "abacus"})},
        "heads_in_words": {config_file: json.dumps(config | {"num_attention_heads": "two"})},
        "config_cut": {config_file: '{"model_type"'},
        "config_list": {config_file: "[1]"},
        "config_empty": {config_file: "{}"},
        "tokenizer_empty": {"tokenizer.json": "{}"},
        "tokenizer_cut": {"tokenizer.json": '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE"'},
        "tokenizer_config_cut": {"tokenizer_config.json": "nope"},
        "template_cut": {"chat_template.jinja": "{% for message in %}"},
    }
    for name, files in changes.items():
        shutil.copytree(good, folder / name)
        for file, content in files.items():
            path = folder / name / file
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
