"""Builds the trainers of a benchmark: TRL's, with a random model and prepared rows."""

from __future__ import annotations

import contextlib
import random
import tempfile
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import trl
from datasets import Dataset
from trl.data_utils import is_conversational

from ...trainers.batching.prefix_groups import group_rows
from ...trainers.data.turns import expand_turns
from ..data import give_template, texts_of
from ..formats import to_dialogues
from ..reading import load_tokenizer
from ..tiny import BENCH_SHAPES, build_hybrid, build_qwen2, train_tokenizer
from ..token_rows import token_rows
from .batches import in_parts
from .data import random_completions, random_prompts
from .steps import BenchStep, decoder_inputs


if TYPE_CHECKING:
    from datasets import IterableDataset
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerBase, TrainingArguments

    from .settings import BenchSettings

__all__ = ["prepare"]

EPOCH = 4096
"""Largest number of rows in the epoch that `group_by_prefix` groups, and of conversations that are expanded."""

BETA = 0.04
"""GRPO's `beta`, the weight of the KL term, if there is a reference. Any value but 0 costs the same."""


def prepare(data: Dataset | None, settings: BenchSettings) -> BenchStep:
    """
    Build a TRL trainer with a random model, and the prepared rows (for GRPO: batches) of all steps.

    Args:
        data ([`~datasets.Dataset`], *optional*):
            Rows that the trainer takes, or tokenized ones; SFT trains on the chosen side of pairs. Without data GRPO
            draws prompts.
        settings ([`BenchSettings`]):
            Settings of the benchmark.

    Raises:
        ValueError: If the data has too few rows.
    """
    count = settings.batch_rows * (settings.warmup + settings.steps)
    if settings.trainer == "grpo":
        return _build_grpo(data, settings, count)
    if settings.trainer == "sft":
        data = to_dialogues(data)
    tokenizer, rendered = _tokenizer(data, settings)
    grouped = settings.shuffle and "group_by_prefix" in settings.variants
    # Twice as many as needed, because TRL drops pairs whose prompt fills `max_length`. Rows are grouped per epoch.
    needed = EPOCH if grouped else 2 * count
    if settings.shuffle:
        data = data.shuffle(seed=settings.seed)
    if settings.expand_turns:  # a training shuffles the rows of the turns, too
        data = expand_turns(data.select(range(min(len(data), EPOCH))))
        data = data.shuffle(seed=settings.seed) if settings.shuffle else data
    data = data.select(range(min(len(data), needed)))
    args = _arguments(settings, max_length=settings.max_length)
    kwargs = dict(args=args, train_dataset=data, processing_class=tokenizer, peft_config=_lora(settings))
    policy = _model(tokenizer, settings, settings.seed)
    if settings.trainer == "sft":
        trainer = trl.SFTTrainer(model=policy, **kwargs)
    else:
        reference = None if settings.lora else _model(tokenizer, settings, settings.seed + 1)
        trainer = _TokenizedDPO(model=policy, ref_model=reference, **kwargs)
    names = ("prompt_ids", "chosen_ids", "rejected_ids", "input_ids", "labels")
    prepared = trainer.train_dataset
    rows = prepared.select_columns([name for name in names if name in prepared.column_names]).to_list()
    if len(rows) < count:
        raise _too_few(len(rows), count)
    return BenchStep(trainer, (_grouped(rows, count, settings) if grouped else rows)[:count], settings, rendered)


def _too_few(rows: int, needed: int) -> ValueError:
    return ValueError(f"The data gives {rows} rows, and {needed} are needed: fewer steps, or smaller batches.")


def _tokenizer(data: Dataset | None, settings: BenchSettings) -> tuple[PreTrainedTokenizerBase, str | None]:
    """The tokenizer of the settings, or one trained on the data; and its chat template in words, for conversations."""
    has_text = data is not None and not {"prompt_ids", "input_ids"} & set(data.column_names)
    if (name := settings.tokenizer) is None:
        texts = [""] if data is None or not has_text else texts_of(data.select(range(min(len(data), EPOCH))))
        tokenizer = train_tokenizer(texts, min(BENCH_SHAPES[settings.shape]["vocab_size"], 8192))
        template = "a plain chat template; `--tokenizer ID` takes that of a model"
    else:
        tokenizer = load_tokenizer(name)
        template = f"a plain chat template, as {name} has none" if give_template(tokenizer) else f"that of {name}"
    return tokenizer, template if data is not None and has_text and is_conversational(data[0]) else None


def _grouped(rows: list[dict[str, Any]], count: int, settings: BenchSettings) -> list[dict[str, Any]]:
    """
    Rows of the first steps of an epoch with `group_by_prefix`.

    Warmup rows come first. The counted rows are shuffled, so that variants without grouping have random batches of the
    same rows.
    """
    draw = random.Random(settings.seed)
    order = draw.sample(range(len(rows)), len(rows))
    grouped = group_rows(order, settings.measure(sharing=True).costs(rows), settings.pairs).tolist()
    begin = settings.warmup * settings.pairs
    warmup, counted = grouped[:begin], grouped[begin:count]
    draw.shuffle(counted)
    return [rows[i] for i in [*warmup, *counted]]


class _TokenizedDPO(trl.DPOTrainer):
    """DPO that leaves tokenized pairs as they are."""

    def _prepare_dataset(self, dataset: Dataset | IterableDataset, *args: Any) -> Any:
        return dataset if "prompt_ids" in (dataset.column_names or []) else super()._prepare_dataset(dataset, *args)


class _OfflineGRPO(trl.GRPOTrainer):
    """GRPO on completions that exist already: log-probabilities, loss and backward, no generation."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.beta:  # TRL computes old and reference log-probabilities with the generation: here, to be timed
            inputs = inputs | self._reference_logps(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    @torch.no_grad()
    def _reference_logps(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Log-probabilities of the policy before the step and of the reference, `(N, C)` each."""
        ids, mask = decoder_inputs(inputs).values()

        def logps(model: torch.nn.Module) -> torch.Tensor:
            return self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]

        old = logps(self.model)
        # With LoRA the policy without its adapters is the reference.
        with contextlib.nullcontext() if self.ref_model is not None else self.model.disable_adapter():
            return {"old_per_token_logps": old, "ref_per_token_logps": logps(self.ref_model or self.model)}


def _build_grpo(data: Dataset | None, settings: BenchSettings, count: int) -> BenchStep:
    """
    GRPO on `pairs` prompts with `generations` random completions each, of about the lengths of the settings. Without
    data the prompts are random, too.
    """
    tokenizer, rendered = _tokenizer(data, settings)
    needed, draw = settings.pairs * count, torch.Generator().manual_seed(settings.seed)
    if data is None:
        prompts = random_prompts(needed, settings, draw)
    else:
        data = data.shuffle(seed=settings.seed) if settings.shuffle else data
        if len(data) < needed:
            raise _too_few(len(data), needed)
        rows = token_rows(list(data.select(range(needed))), tokenizer, "grpo")
        prompts = [row["prompt_ids"] for row in rows]
    policy = _model(tokenizer, settings, settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        if settings.logprob_passes and not settings.lora:  # TRL loads the reference from the policy's path
            _model(tokenizer, settings, settings.seed + 1).save_pretrained(folder)
            policy.config.name_or_path = folder
        trainer = _OfflineGRPO(
            model=policy,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=_arguments(
                settings,
                per_device_train_batch_size=settings.pairs * settings.generations,
                num_generations=settings.generations,
                max_completion_length=2 * settings.completion_length,
                beta=BETA if settings.logprob_passes else 0.0,
            ),
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=tokenizer,
            peft_config=_lora(settings),
        )
    trainer.data_collator = lambda rows: deepcopy(rows[0])  # a row is a whole batch
    vocab_size = policy.config.vocab_size
    batches = [random_completions(part, settings, vocab_size, draw) for part in in_parts(prompts, settings.pairs)]
    return BenchStep(trainer, batches, settings, rendered)


def _arguments(settings: BenchSettings, **more: Any) -> TrainingArguments:
    config = {"dpo": trl.DPOConfig, "sft": trl.SFTConfig, "grpo": trl.GRPOConfig}[settings.trainer]
    common = dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=settings.pairs,
        gradient_checkpointing=settings.gradient_checkpointing,
        bf16=settings.dtype == "autocast",
        use_liger_kernel=settings.liger,
        use_cpu=settings.device == "cpu",
        report_to=[],
        seed=settings.seed,
    )
    return config(**common | more)


def _model(tokenizer: PreTrainedTokenizerBase, settings: BenchSettings, seed: int) -> torch.nn.Module:
    shape = dict(BENCH_SHAPES[settings.shape])
    shape["vocab_size"] = max(shape["vocab_size"], len(tokenizer))
    with torch.device(settings.device):  # random numbers for a large model take minutes on a CPU
        build = build_hybrid if "linear_heads" in shape else build_qwen2
        options = {"attn_implementation": settings.attn, "dtype": settings.weights_dtype}
        return build(tokenizer, **shape, seed=seed, **options).to(settings.device, settings.weights_dtype)


def _lora(settings: BenchSettings) -> LoraConfig | None:
    if not settings.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=settings.lora, target_modules="all-linear", task_type="CAUSAL_LM")
