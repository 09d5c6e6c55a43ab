"""axolotl's `axolotl train`, in this process, with the keys of its YAML, for one step."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train
from axolotl.integrations.base import BasePlugin
from transformers import PreTrainedModel

from conformance.adapter import Adapter, NotRun, Recorder, flash_stand_in
from conformance.arbiter import Row, Step
from conformance.words import save


class Recording(BasePlugin):
    """A plug-in that adds the recorder."""

    recorder: Recorder

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Recorder]:
        Recording.recorder = Recorder()
        return [Recording.recorder]


class SFT(Adapter):
    packages = ("torch", "transformers", "trl", "axolotl")

    def __init__(self, name: str, attention: str, **fields: Any) -> None:
        self.name, self.fields = name, fields | {"attn_implementation": attention}
        self.setting = ", ".join(f"{k}: {json.dumps(v)}" for k, v in self.fields.items())

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        rows, size = [row for batch in batches for row in batch], len(batches[0])
        room = 64
        if self.fields.get("sample_packing"):
            if len(batches) > 1:
                raise NotRun("Which rows share a micro-batch is for the packer to choose.")
            room, size = sum(len(row.ids) for row in rows), 1
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            lines = [{"input_ids": r.ids, "attention_mask": [1] * len(r.ids), "labels": r.labels} for r in rows]
            (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
            settings = dict(
                base_model=save(model, folder / "model"), output_dir=str(folder / "out"), sequence_len=room,
                datasets=[{"path": str(folder / "rows.jsonl"), "ds_type": "json", "split": "train", "type": None}],
                dataset_prepared_path=str(folder / "prepared"), micro_batch_size=size, max_steps=1,
                gradient_accumulation_steps=len(batches), learning_rate=1e-3, optimizer="sgd", max_grad_norm=0.0,
                lr_scheduler="constant", bf16=False, tf32=False, logging_steps=1, min_sample_len=1,
                special_tokens={"pad_token": "<pad>"}, plugins=[f"{__name__}.Recording"],
                dataset_num_proc=1, num_dataset_shards_to_save=1, save_strategy="no",
            )  # fmt: skip
            (folder / "config.yml").write_text(yaml.safe_dump(settings | self.fields))
            do_train(load_cfg(str(folder / "config.yml")), TrainerCliArgs())
        return Recording.recorder.step


class Flash(SFT):
    """On functions that stand in for flash-attn."""

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        with flash_stand_in(model):
            return super().step(model, batches)


ADAPTERS = [
    SFT("axolotl-padded", "sdpa"),
    SFT("axolotl-sample-packing-sdpa", "sdpa", sample_packing=True, pad_to_sequence_len=False),
    SFT("axolotl-sample-packing-eager", "eager", sample_packing=True, pad_to_sequence_len=False),
    Flash("axolotl-sample-packing-flash", "flash_attention_2", sample_packing=True, pad_to_sequence_len=False),
]
