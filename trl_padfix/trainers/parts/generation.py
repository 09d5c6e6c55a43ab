"""The part of a trainer that generates during evaluation (`predict_with_generate`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.trainer_utils import denumpify_detensorize
from trl.data_utils import is_conversational, maybe_apply_chat_template, prepare_multimodal_messages

from ...core.generation import generate
from ..data.chat_templates import tokenizer_of, tools_of
from ..distributed import splitting_parallelism
from .part import Evaluation, Part


__all__ = ["Generation"]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model gets it, with its images, and the reference answer of the dataset."""

    text: str
    reference: str
    images: list[Any] = field(default_factory=list)
    is_chat: bool = False
    """Whether a chat template rendered the text, special tokens included."""


class Generation(Part):
    """
    After the loss of an evaluation dataset, generates answers to its prompts.

    Predictions and references go to `compute_metrics`, the texts to a file. The loss stays the same, but logits are
    not kept.
    """

    evaluated: Any = None
    """The dataset of the running evaluation: the one of the data loader built last."""

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        if self.settings.predict_with_generate and init_kwargs.get("formatting_func") is not None:
            raise ValueError("`predict_with_generate=True` would ignore `formatting_func`. Leave one of them out.")

    def acts(self) -> bool:
        return self.settings.predict_with_generate

    def on_init_end(self) -> None:
        """Check prompts and settings before the first step instead of at the first evaluation."""
        trainer, evaluated = self.trainer, self.trainer.eval_dataset
        if size := splitting_parallelism(trainer.accelerator, "tp_size", "cp_size", "sp_size"):
            raise NotImplementedError(
                f"`predict_with_generate=True` gives every process different prompts, but `{size}` lets several "
                "processes work on one batch. Set `predict_with_generate=False`, and generate after training."
            )
        for name, dataset in (evaluated if isinstance(evaluated, dict) else {"eval": evaluated}).items():
            _require_prompts(dataset, name)
            # A prompt without a token is an error. Images have tokens, and encoding all of them takes long.
            for _ in self._batches(dataset, range(0 if trainer._is_vision_dataset else len(dataset))):
                pass
            is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled  # weights may come later
            if not is_sharded:  # one token for the first prompt: `generate` refuses what it cannot do
                self._generate_from(dataset, count=1, max_new_tokens=1, min_new_tokens=None)

    def around_dataloader(self, dataset: Any, is_training: bool) -> AbstractContextManager[Any]:
        if not is_training:
            self.evaluated = dataset
        return nullcontext()

    @contextmanager
    def around_evaluation_loop(self, evaluation: Evaluation) -> Iterator[None]:
        prefix, trainer, dataset = evaluation.prefix, self.trainer, self.evaluated
        _require_prompts(dataset, prefix)
        evaluation.loss_only = True  # `compute_metrics` gets generated tokens, so logits are not kept
        yield
        samples, predicted = self._generate_from(dataset, len(dataset))
        if trainer.compute_metrics is not None:
            given = {"compute_result": True} if trainer.args.batch_eval_metrics else {}
            for name, value in denumpify_detensorize(trainer.compute_metrics(predicted, **given)).items():
                evaluation.output.metrics[f"{prefix}_{name.removeprefix(f'{prefix}_')}"] = value
        if trainer.is_world_process_zero():
            name = prefix.removeprefix("eval").strip("_").replace("/", "_")  # name of one of several datasets
            name = f"step_{trainer.state.global_step:05d}_{name}".strip("_") + ".jsonl"
            file = Path(trainer.args.output_dir) / "generations" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(s, ensure_ascii=False) + "\n" for s in samples), encoding="utf-8")
        found = {"predictions": predicted.predictions, "label_ids": predicted.label_ids}
        evaluation.output = evaluation.output._replace(**found)

    def _generate_from(
        self, dataset: Dataset, count: int, **kwargs: Any
    ) -> tuple[list[dict[str, str]], EvalPrediction]:
        """Generate from `count` prompts of a dataset, partitioned over processes; all processes get all samples."""
        accelerator = self.trainer.accelerator
        share = -(-count // accelerator.num_processes)
        first = share * accelerator.process_index
        # Sharded models meet in each forward, so processes need equally many prompts: the last ones are repeated, and
        # dropped again by the dictionary of indices.
        indices = [min(i, count - 1) for i in range(first, first + share)]
        generated, tokenizer = [], tokenizer_of(self.trainer.processing_class)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        settings = self._generation_settings(model) | kwargs
        with self._generating():
            for numbers, prompts, batch in self._batches(dataset, indices):
                columns = batch["input_ids"].shape[1]
                rows = generate(model, self.trainer._prepare_inputs(batch), **settings)
                for i, prompt in enumerate(prompts):
                    ids = batch["input_ids"][i][batch["attention_mask"][i].bool()]
                    reference = tokenizer(prompt.reference, add_special_tokens=False)["input_ids"]
                    generated.append((numbers[i], (prompt.text, ids.tolist(), rows[i, columns:].tolist(), reference)))
        gathered = dict(gather_object(generated))
        texts, inputs, predictions, references = zip(*(gathered[i] for i in range(count)), strict=True)
        decoded = (tokenizer.batch_decode(list(ids), skip_special_tokens=True) for ids in (predictions, references))
        rows = zip(texts, *decoded, strict=True)
        samples = [{"prompt": prompt, "prediction": answer, "reference": ref} for prompt, answer, ref in rows]
        pad = tokenizer.pad_token_id
        inputs = _padded(inputs, pad) if "inputs" in self.trainer.args.include_for_metrics else None
        return samples, EvalPrediction(_padded(predictions, pad), _padded(references, -100), inputs)

    def _batches(
        self, dataset: Dataset, indices: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], list[Prompt], dict[str, Any]]]:
        """Batches of the rows at `indices`: their numbers, their prompts, and token ids, mask and images."""
        processing: Any = self.trainer.processing_class
        size = self.trainer.args.per_device_eval_batch_size
        template = getattr(self.trainer, "chat_template", None)
        for numbers in (indices[start : start + size] for start in range(0, len(indices), size)):
            prompts = [_prompt_of(dataset[i], processing, template) for i in numbers]
            images = [prompt.images for prompt in prompts]
            batch = processing(
                text=[prompt.text for prompt in prompts],
                padding=True,
                return_tensors="pt",
                # As TRL: a chat template has added special tokens already, and with images TRL adds none.
                add_special_tokens=not (prompts[0].is_chat or self.trainer._is_vision_dataset),
                **({"images": images} if any(images) else {}),
            )
            if empty := [i for i, mask in zip(numbers, batch["attention_mask"], strict=True) if not mask.any()]:
                raise ValueError(
                    f"The prompt of row {empty[0]} (counted from 0) of an evaluation dataset has no token, and "
                    "`predict_with_generate=True` has nothing to continue there. Drop such rows."
                )
            names = batch.keys() if isinstance(processing, ProcessorMixin) else ("input_ids", "attention_mask")
            yield numbers, prompts, {name: batch[name] for name in names}

    def _generation_settings(self, model: Any) -> dict[str, Any]:
        """Keyword arguments of `generate`; the end tokens of model and tokenizer both end a text."""
        tokenizer = tokenizer_of(self.trainer.processing_class)
        ends = model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        return {
            "max_new_tokens": self.settings.generation_max_new_tokens,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": sorted(ends) or None,
            "num_return_sequences": 1,  # the model's own generation config may ask for more, and for a dictionary
            "return_dict_in_generate": False,
        }

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """A block with its own random state, equal at every evaluation, and with FSDP's root weights gathered."""
        model, args = self.trainer.model, self.trainer.args
        devices = {p.device for p in model.parameters() if p.device.type == args.device.type != "cpu"}
        is_sharded = isinstance(model, FullyShardedDataParallel)
        root = FullyShardedDataParallel.summon_full_params(model, recurse=False) if is_sharded else nullcontext()
        with torch.random.fork_rng(list(devices), device_type=args.device.type if devices else "cuda"), root:
            torch.manual_seed(args.seed + self.trainer.accelerator.process_index)
            yield


def _require_prompts(dataset: Any, name: str) -> None:
    """Raise a `ValueError` if a dataset is not a `Dataset` with rows that separate prompt and answer."""
    columns = set(dataset.column_names) if isinstance(dataset, Dataset) and len(dataset) else set()
    if "messages" not in columns and not ("prompt" in columns and columns & {"completion", "chosen"}):
        there = f"It has the columns {sorted(columns)}." if columns else f"It is of type `{type(dataset).__name__}`."
        there = "No `eval_dataset` is given." if dataset is None else there
        raise ValueError(
            f"`predict_with_generate=True` takes prompts from the {name} dataset: a `datasets.Dataset` with columns "
            "`prompt` and `completion` (or `chosen`), or with `messages`, whose last assistant message is the "
            f"reference. {there}"
        )


def _prompt_of(
    row: dict[str, Any], processing_class: PreTrainedTokenizerBase | ProcessorMixin, chat_template: str | None
) -> Prompt:
    """Prompt and reference of a row: from `prompt` and `completion` or `chosen`, or else from `messages`."""
    images = [row["image"]] if row.get("image") is not None else list(row.get("images") or [])
    answers = [row[name] for name in ("completion", "chosen") if name in row]
    prompt, answer = (row["prompt"], answers[0]) if answers else (row["messages"], [])
    if not is_conversational({"prompt": prompt}):
        return Prompt(prompt, answer, images)
    if isinstance(processing_class, ProcessorMixin):
        prompt, answer = (prepare_multimodal_messages(m, images=i) for m, i in ((prompt, images), (answer, [])))
    if not answers:
        last = max((i for i, message in enumerate(prompt) if message["role"] == "assistant"), default=0)
        prompt, answer = prompt[:last], prompt[last : last + 1]
    if not prompt:
        roles = [message["role"] for message in row.get("messages", answer)]
        raise ValueError(
            f"A conversation of an evaluation dataset has the roles {roles}: no assistant message follows another "
            "message, so there is nothing to generate. Drop such rows."
        )
    settings = row.get("chat_template_kwargs")
    rendered = maybe_apply_chat_template(
        {"prompt": prompt, "completion": answer} | ({"chat_template_kwargs": settings} if settings else {}),
        processing_class,
        tools_of(row),
        **({"chat_template": chat_template} if chat_template is not None else {}),
    )
    return Prompt(rendered["prompt"], rendered["completion"], images, is_chat=True)


def _padded(rows: Sequence[list[int]], value: int) -> np.ndarray:
    """Lists of token ids as one array `(n, longest)`, padded on the right."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(ids, batch_first=True, padding_value=value).numpy()
