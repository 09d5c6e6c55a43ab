"""ms-swift's `sft_main`, with the arguments of `swift sft`, for one step."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from swift import sft_main
from swift.callbacks import callbacks_map
from swift.template import TemplateMeta, register_template
from transformers import PreTrainedModel

from conformance.adapter import Adapter, NotRun, Recorder, arguments, flash_stand_in
from conformance.arbiter import Row, Step
from conformance.words import prompt_and_response, save


MODEL_TYPES = {
    "qwen3": "qwen3", "llama": "llama", "mistral": "mistral", "gemma2": "gemma2", "phi3": "phi3",
    "qwen3_moe": "qwen3_moe", "qwen3_next": "qwen3_next", "gpt_oss": "gpt_oss",
}  # fmt: skip


register_template(TemplateMeta("words", prefix=[], prompt=["{{QUERY}}"], chat_sep=None, suffix=[]))  # adds no token


class Recording(Recorder):
    """A recorder with the constructor of ms-swift's callbacks."""

    last: Recorder

    def __init__(self, args: Any, trainer: Any) -> None:
        Recording.last = self


class SFT(Adapter):
    packages = ("torch", "transformers", "trl", "ms-swift")

    def __init__(self, name: str, attention: str, **fields: Any) -> None:
        self.name, self.fields = name, fields | {"attn_impl": attention}
        self.setting = " ".join(f"--{k} {json.dumps(v)}" for k, v in self.fields.items())

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        rows = [row for batch in batches for row in batch]
        if (kind := MODEL_TYPES.get(model.config.model_type)) is None:
            raise NotRun("ms-swift has no type for a text model of this kind.")
        given = arguments(batches)
        if self.fields.get("packing"):
            if len(batches) > 1:
                raise NotRun("Which rows share a micro-batch is for the packer to choose.")
            given |= {"packing_length": sum(len(row.ids) for row in rows), "per_device_train_batch_size": 1}
        texts = [prompt_and_response(row) for row in rows]
        callbacks_map["conformance"] = Recording
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            if self.fields["attn_impl"] == "flash_attn":
                stack.enter_context(flash_stand_in(model))
            data = Path(name, "rows.jsonl")
            data.write_text("\n".join(json.dumps({"messages": _dialogue(*text)}) for text in texts))
            settings = dict(
                model=save(model, Path(name, "model")), model_type=kind, template="words", tuner_type="full",
                dataset=str(data), torch_dtype="float32", callbacks="conformance", learning_rate=1e-3,
                load_from_cache_file=False, dataset_num_proc=1, dataloader_num_workers=0, split_dataset_ratio=0,
            )  # fmt: skip
            if balance := getattr(model.config, "router_aux_loss_coef", 0.0):
                given["router_aux_loss_coef"] = balance  # ms-swift sets 0 by default
            given |= settings | self.fields | {"output_dir": str(Path(name, "out"))}
            sft_main([word for key, value in given.items() for word in (f"--{key}", str(value))])
        return Recording.last.step


def _dialogue(prompt: str, response: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": " " + response}]


ADAPTERS = [
    SFT("ms-swift-padded", "sdpa"),
    SFT("ms-swift-padding-free", "flash_attn", padding_free=True),
    SFT("ms-swift-packing", "flash_attn", packing=True),
]
