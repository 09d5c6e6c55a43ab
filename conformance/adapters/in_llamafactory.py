"""LLaMA-Factory's `run_exp`, with the settings of its YAML, for one step."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from llamafactory.train.tuner import run_exp
from transformers import PreTrainedModel

from conformance.adapter import Adapter, NotRun, Recorder, arguments
from conformance.arbiter import Row, Step
from conformance.words import prompt_and_response, save


class SFT(Adapter):
    packages = ("torch", "transformers", "trl", "llamafactory")

    def __init__(self, name: str, attention: str, **fields: bool) -> None:
        self.name, self.fields, self.attention = name, fields | {"flash_attn": attention}, None
        self.setting = ", ".join(f"{k}: {json.dumps(v)}" for k, v in self.fields.items())

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        rows = [row for batch in batches for row in batch]
        given = arguments(batches)
        if self.fields.get("neat_packing"):
            if len(batches) > 1:
                raise NotRun("Which rows share a micro-batch is for the packer to choose.")
            room = (sum(len(row.ids) for row in rows) // 8 + 1) * 8  # it pads ids to a multiple of 8, not positions
            given |= {"cutoff_len": room, "per_device_train_batch_size": 1}
        texts = [dict(zip(("prompt", "response"), prompt_and_response(row), strict=True)) for row in rows]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "rows.json").write_text(json.dumps(texts))
            columns = {"prompt": "prompt", "response": "response"}
            (folder / "dataset_info.json").write_text(
                json.dumps({"rows": {"file_name": "rows.json", "columns": columns}})
            )
            settings = dict(
                model_name_or_path=save(model, folder / "model"), stage="sft", do_train=True, finetuning_type="full",
                dataset="rows", dataset_dir=name, template="empty", disable_gradient_checkpointing=True,
                learning_rate=1e-3, overwrite_cache=True,
            )  # fmt: skip
            recorder = Recorder()
            run_exp(given | settings | self.fields | {"output_dir": str(folder / "out")}, [recorder])
        return recorder.step


ADAPTERS = [
    SFT("llamafactory-padded", "sdpa"),
    SFT("llamafactory-neat-packing", "sdpa", neat_packing=True),
    SFT("llamafactory-neat-packing-eager", "disabled", neat_packing=True),
]
