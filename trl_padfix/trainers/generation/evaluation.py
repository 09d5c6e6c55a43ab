"""The part of a trainer that generates during evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction, ProcessorMixin
from transformers.trainer_utils import denumpify_detensorize

from ...core.generation import check_budget, evaluating, generate
from ..batching.token_budget import TokenBudget
from ..data.tokenizers import tokenizer_of
from ..distributed import is_sharded, splitting_parallelism
from ..parts import Evaluation, Part
from ..settings import check_generation_settings
from .prompts import Prompt, prompt_of, require_prompts
from .samples import Sample, show, write


if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import TrainingArguments


__all__ = ["Generation"]


class Generation(Part):
    """
    `predict_with_generate`: after the loss of an evaluation dataset, generates answers to its prompts.

    Predictions and references go to `compute_metrics`, the texts to a file, the log and the trackers. The loss is
    computed as without it, but keeps no logits.
    """

    evaluated: Any = None
    """The dataset of the running evaluation: the one of the data loader built last."""

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        if self.settings.predict_with_generate:
            check_generation_settings(self.settings)
            _check_datasets(init_kwargs.get("eval_dataset"))
            _check_incompatible(config, init_kwargs)

    def on_init_end(self) -> None:
        """Check prompts and settings before the first step instead of at the first evaluation."""
        if not self.settings.predict_with_generate:
            return
        trainer = self.trainer
        size = splitting_parallelism(trainer.accelerator, "tp_size", "cp_size", "sp_size")
        if size is not None:
            raise NotImplementedError(
                f"`predict_with_generate=True` gives every process different prompts, and `{size}` lets several "
                "processes work on one batch. Set `predict_with_generate=False`, and generate after training."
            )
        evaluated = trainer.eval_dataset
        for name, dataset in (evaluated if isinstance(evaluated, dict) else {"eval": evaluated}).items():
            require_prompts(dataset, name)
            batches = self._batches(dataset, range(self._count(dataset)))
            longest = max(int(batch["attention_mask"].sum(1).max()) for *_, batch in batches)
            check_budget(self._generator, longest, **self._generation_settings())
            sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled  # weights may come later
            if self.settings.generation_kwargs and not sharded:
                self._try_generation_kwargs(dataset)

    def _try_generation_kwargs(self, dataset: Dataset | IterableDataset) -> None:
        """Raise a `ValueError` if `generate` fails with `generation_kwargs`: tries the first prompt, for one token."""
        ((*_, batch),) = self._batches(dataset, [0])
        model = self._generator
        batch = {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        try:
            with self._generating():
                generate(model, batch, **self._generation_settings() | {"max_new_tokens": 1})
        except Exception as error:
            raise ValueError(
                f"`generation_kwargs={self.settings.generation_kwargs!r}` cannot be generated with: {error} Correct "
                "them; the run would stop at its first evaluation."
            ) from error

    def around_dataloader(self, dataset: Dataset | IterableDataset, is_training: bool) -> AbstractContextManager[Any]:
        if not is_training:
            self.evaluated = dataset
        return nullcontext()

    def around_evaluate(self) -> AbstractContextManager[Any]:
        return evaluating(self.trainer.model) if self.settings.predict_with_generate else nullcontext()

    @contextmanager
    def around_evaluation_loop(self, evaluation: Evaluation) -> Iterator[None]:
        if not self.settings.predict_with_generate:
            yield
            return
        prefix, trainer, dataset = evaluation.prefix, self.trainer, self.evaluated
        require_prompts(dataset, prefix)
        evaluation.loss_only = True  # `compute_metrics` gets generated tokens, so logits are not kept
        yield
        samples, predicted = self._generate_from(dataset)
        if trainer.compute_metrics is not None:
            for name, value in denumpify_detensorize(trainer.compute_metrics(predicted)).items():
                prefixed = name.startswith(f"{prefix}_")
                evaluation.output.metrics[name if prefixed else f"{prefix}_{name}"] = value
        if trainer.is_world_process_zero():
            step = trainer.state.global_step
            name = prefix.removeprefix("eval").strip("_").replace("/", "_")  # name of one of several datasets
            file = f"step_{step:05d}_{name}".strip("_") + ".jsonl"
            write(samples, Path(trainer.args.output_dir) / "generations" / file)
            shown = samples[: self.settings.generation_rows_shown]
            show(shown, f"{prefix}/generations", step, trainer.callback_handler.callbacks)
        evaluation.output = evaluation.output._replace(
            predictions=predicted.predictions, label_ids=predicted.label_ids
        )

    def _generate_from(self, dataset: Dataset | IterableDataset) -> tuple[list[Sample], EvalPrediction]:
        """Generate from the prompts of a dataset, partitioned over processes; returns all samples on all processes."""
        count = self._count(dataset)
        share = -(-count // self.trainer.accelerator.num_processes)
        first = share * self.trainer.accelerator.process_index
        # Sharded models meet in each forward, so processes need equally many prompts: the last ones are repeated, and
        # dropped again by the dictionary of indices.
        indices = [min(i, count - 1) for i in range(first, first + share)]
        generated, tokenizer = [], tokenizer_of(self.trainer.processing_class)
        with self._generating():
            for numbers, prompts, batch in self._batches(dataset, indices):
                columns = batch["input_ids"].shape[1]
                rows = generate(self._generator, self.trainer._prepare_inputs(batch), **self._generation_settings())
                for i, prompt in enumerate(prompts):
                    ids = batch["input_ids"][i][batch["attention_mask"][i].bool()]
                    reference = tokenizer(prompt.reference, add_special_tokens=False)["input_ids"]
                    sample = (prompt.text, ids.tolist(), rows[i, columns:].tolist(), reference)
                    generated.append((numbers[i], sample))
        gathered = dict(gather_object(generated))
        texts, inputs, predictions, references = zip(*(gathered[i] for i in range(count)), strict=True)
        decoded = (tokenizer.batch_decode(list(ids), skip_special_tokens=True) for ids in (predictions, references))
        includes_inputs = "inputs" in (getattr(self.trainer.args, "include_for_metrics", None) or [])
        rows = zip(texts, *decoded, strict=True)
        samples: list[Sample] = [{"prompt": p, "prediction": answer, "reference": r} for p, answer, r in rows]
        return samples, EvalPrediction(
            predictions=padded(predictions, tokenizer.pad_token_id),
            label_ids=padded(references, -100),
            inputs=padded(inputs, tokenizer.pad_token_id) if includes_inputs else None,
        )

    def _count(self, dataset: Dataset | IterableDataset) -> int:
        limit = self.settings.eval_generation_samples
        return len(dataset) if limit is None else min(limit, len(dataset))

    def _batches(
        self, dataset: Dataset | IterableDataset, indices: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], list[Prompt], dict[str, Any]]]:
        """Batches of the rows at `indices`: their numbers, their prompts, and token ids, mask and images."""
        processing: Any = self.trainer.processing_class
        size = self.trainer.args.per_device_eval_batch_size
        template = getattr(self.trainer, "chat_template", None)
        for start in range(0, len(indices), size):
            numbers = indices[start : start + size]
            prompts = [prompt_of(dataset[i], processing, template) for i in numbers]
            batch = self._encode(prompts)
            parts = self._within_budget(batch["attention_mask"].sum(1).tolist())
            for part in parts:
                yield numbers[part], prompts[part], batch if len(parts) == 1 else self._encode(prompts[part])

    def _encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Token ids, mask and images of prompts."""
        processing: Any = self.trainer.processing_class
        images = [prompt.images for prompt in prompts]
        batch = processing(
            text=[prompt.text for prompt in prompts],
            padding=True,
            return_tensors="pt",
            # As TRL: a chat template has added special tokens already, and with images TRL adds none.
            add_special_tokens=not (prompts[0].is_chat or self.trainer._is_vision_dataset),
            **({"images": images} if any(images) else {}),
        )
        names = batch.keys() if isinstance(processing, ProcessorMixin) else ("input_ids", "attention_mask")
        return {name: batch[name] for name in names}

    def _within_budget(self, lengths: list[int]) -> list[slice]:
        """Consecutive prompts whose cache fits into `max_tokens_per_batch`, padded as it is; or one prompt."""
        budget = self.trainer.padding.part(TokenBudget).budget
        if budget is None or is_sharded(self.trainer):  # whose processes meet in each forward
            return [slice(0, len(lengths))]
        parts, begin = [], 0
        for end in range(1, len(lengths) + 1):
            tokens = (end - begin) * (max(lengths[begin:end]) + self.settings.generation_max_new_tokens)
            if tokens > budget and end - begin > 1:
                parts.append(slice(begin, end - 1))
                begin = end - 1
        return [*parts, slice(begin, len(lengths))]

    @property
    def _generator(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    def _generation_settings(self) -> dict[str, Any]:
        """Keyword arguments of `generate`; the end tokens of model and tokenizer both end a text."""
        tokenizer = tokenizer_of(self.trainer.processing_class)
        kwargs: Any = self.settings.generation_kwargs or {}  # a string (YAML in a command) is parsed by the config
        ends = self._generator.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        return {
            "max_new_tokens": self.settings.generation_max_new_tokens,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": sorted(ends) or None,
        } | kwargs

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


def _check_datasets(datasets: Any) -> None:
    if datasets is None:
        raise ValueError("`predict_with_generate=True` takes prompts from the `eval_dataset`, and there is none.")
    for dataset in datasets.values() if isinstance(datasets, dict) else [datasets]:
        if not isinstance(dataset, Dataset):
            raise ValueError(
                "`predict_with_generate=True` partitions the prompts of an evaluation dataset over processes, and a "
                f"`{type(dataset).__name__}` has no length. Pass a `datasets.Dataset`, for instance made of the "
                "stream with `Dataset.from_generator`."
            )
        if len(dataset) == 0:
            raise ValueError("An evaluation dataset is empty, and `predict_with_generate=True` needs its prompts.")


def _check_incompatible(config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` for settings that contradict generation, or that it would ignore."""
    reasons = {
        "eval_packing": "packed rows have no prompts any more; set `eval_packing=False`",
        "formatting_func": "it makes one text of a row; map the data to `prompt` and `completion` instead",
        "preprocess_logits_for_metrics": "`compute_metrics` gets generated tokens, and no logits are kept",
        "batch_eval_metrics": "`compute_metrics` is called once, with all predictions",
        "include_for_metrics": "there is no loss of a prediction; leave 'loss' out",
        "use_legacy_prediction_loop": "that loop does not generate",
    }
    values = {name: init_kwargs.get(name, getattr(config, name, None)) for name in reasons}
    if values["eval_packing"] is None:
        values["eval_packing"] = getattr(config, "packing", False)
    values["include_for_metrics"] = "loss" in (values["include_for_metrics"] or [])
    for name, reason in reasons.items():
        if values[name]:
            raise ValueError(f"`predict_with_generate=True` does not go with `{name}`: {reason}.")


def padded(rows: Sequence[list[int]], value: int) -> np.ndarray:
    """Lists of token ids as one array `(n, longest)`, padded on the right."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(ids, batch_first=True, padding_value=value).numpy()
