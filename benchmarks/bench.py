"""
Time a training step of TRL, padded, and the same step packed: DPO, SFT, or GRPO on completions that exist already.

    python benchmarks/bench.py --data test.jsonl.gz --pairs 8
    python benchmarks/bench.py --device cuda --dtype autocast --shape 0.5b

All variants have the same TRL trainer, policy, reference and rows. They differ in the patches on the models and, for
some, in the rows of a batch. The steps alternate batch by batch, so that a change of the machine's speed affects all
variants. If losses or gradients of the variants differ, there are no figures.

A speedup is the ratio of the times printed beside it: of the median steps, or, for variants that divide the rows into
other batches than TRL, of the times of all rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import transformers
import trl
from datasets import Dataset, load_dataset
from trl.data_utils import is_conversational
from trl.trainer.utils import pad

from trl_padfix import PaddingRemoval, __version__, expand_turns, remove_padding
from trl_padfix.core.patches.compiled import compile_layers
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer
from trl_padfix.trainers.batching.bin_packing import RowCosts, dataset_costs
from trl_padfix.trainers.batching.row_order import group_rows


__all__ = [
    "VARIANTS", "BenchStep", "Settings", "VariantResult", "WrongNumbersError", "attached", "commit", "decoder_inputs",
    "head_as_on_gpu", "measure", "prepare", "profiled", "select_rows",
]  # fmt: skip

T = TypeVar("T")

DEFAULT_DATA = "Anthropic/hh-rlhf"
"""Data for DPO and SFT if none is given: its test split."""

TRAINERS = ("dpo", "sft", "grpo")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference of loss and gradient between variants. bfloat16 has 8 bits: steps of 4e-3."""

EPOCH = 4096
"""Largest number of rows in the epoch that `group_by_prefix` groups, and of conversations that are expanded."""

SEED = 0
"""Seed of weights and batches."""

HYBRID_SHAPES: dict[str, dict[str, int]] = {
    "hybrid": dict(layers=4, hidden_size=256, heads=4, kv_heads=2, intermediate_size=704, vocab_size=8192),
    "hybrid-tiny": dict(layers=4, hidden_size=64, heads=2, kv_heads=1, intermediate_size=96, vocab_size=2048),
}
"""Small shapes of Qwen3.5: three layers with a gated delta rule, then one with attention."""

GPU_SHAPES: dict[str, dict[str, int]] = {
    "0.5b": dict(layers=24, hidden_size=896, heads=14, kv_heads=2, intermediate_size=4864, vocab_size=151936),
    "7b": dict(layers=28, hidden_size=3584, heads=28, kv_heads=4, intermediate_size=18944, vocab_size=152064),
}
"""The shapes of Qwen2.5-0.5B and Qwen2.5-7B."""

ALL_SHAPES = SHAPES | HYBRID_SHAPES | GPU_SHAPES


class WrongNumbersError(RuntimeError):
    """Variants give different losses or gradients for the same rows."""


# -- variants and settings


@dataclass(frozen=True)
class Variant:
    """One way to compute the rows of a benchmark."""

    name: str
    packed: bool = True  # whether padding is removed by trl_padfix
    shares: Any = False  # `prefix_sharing`
    # "fixed": the batches of TRL; "grouped": rows of similar length; "prefix": rows with a common prefix; "packed":
    # TRL's packing, as many tokens as fixed batches.
    batching: str = "fixed"
    compiled: bool = False  # each decoder layer is compiled
    flat: bool = False  # TRL's own `padding_free`: its collator concatenates the rows

    @property
    def has_trls_batches(self) -> bool:
        return self.batching == "fixed"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("trl", packed=False),
        Variant("trl_grouped", packed=False, batching="grouped"),
        Variant("trl_padding_free", packed=False, flat=True),
        Variant("trl_packing", packed=False, flat=True, batching="packed"),
        Variant("padding_free"),
        Variant("prefix_sharing", shares=True),
        Variant("auto", shares="auto"),
        Variant("group_by_prefix", shares=True, batching="prefix"),
        Variant("padding_free_compiled", compiled=True),
        Variant("prefix_sharing_compiled", shares=True, compiled=True),
    )
}


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark: options of the command, and those that only `gpu_report.py` sets."""

    trainer: str = "dpo"
    variants: tuple[str, ...] = ("trl", "padding_free", "prefix_sharing")
    pairs: int = 8  # per batch; with SFT rows, with GRPO prompts
    steps: int = 10
    warmup: int = 2
    shape: str = "small"
    model: str | None = None  # a folder or Hub id, in place of a random model of `shape`
    device: str = "cpu"
    dtype: str = "float32"
    max_length: int = 1024
    memory: bool = True
    expand_turns: bool = False
    shuffle: bool = True  # rows of a tree stay in the order of its turns, unless batches are formed by prefix
    generations: int = 8  # with GRPO: completions of a prompt
    prompt_length: int = 512  # with GRPO: tokens of a random prompt, about
    completion_length: int = 64  # with GRPO: tokens of a completion, about
    lora: int = 0
    gradient_checkpointing: bool = False
    compile_backend: str = "inductor"

    @property
    def weights_dtype(self) -> torch.dtype:
        """Precision of the weights. `"autocast"`, TRL's default, has weights in float32 under bfloat16 autocast."""
        return torch.float32 if self.dtype == "autocast" else getattr(torch, self.dtype)

    @property
    def computed_dtype(self) -> torch.dtype:
        """Precision of the matrix products."""
        return torch.bfloat16 if self.dtype == "autocast" else getattr(torch, self.dtype)

    @property
    def batch_rows(self) -> int:
        """Prepared rows per batch: `pairs`, and 1 for GRPO, whose batches are prepared as one row each."""
        return 1 if self.trainer == "grpo" else self.pairs

    @property
    def batch_size(self) -> str:
        """Size of a batch in words."""
        completions = f"{self.pairs} x {self.generations} completions"
        return {"dpo": f"{self.pairs} pairs", "sft": f"{self.pairs} rows", "grpo": completions}[self.trainer]

    def __post_init__(self) -> None:
        variants = [VARIANTS[name] for name in self.variants if name in VARIANTS]
        has_unknown = len(variants) < len(self.variants)
        if has_unknown or not variants or "trl" in self.variants[1:] or not variants[0].has_trls_batches:
            raise ValueError(
                f"`variants` are names among {', '.join(VARIANTS)}, got {', '.join(self.variants)}. TRL's own comes "
                "first; without it, one with TRL's batches, with which the others are compared."
            )
        if self.trainer == "grpo" and not all(variant.has_trls_batches for variant in variants):
            raise ValueError("GRPO's batches are prompts with all their completions: they cannot be regrouped.")
        if self.trainer != "sft" and any(variant.flat for variant in variants):
            raise ValueError(
                f"TRL's own `padding_free` and packing are SFT's, and the trainer is {self.trainer}: leave "
                "`trl_padding_free` and `trl_packing` out."
            )
        if self.trainer != "sft" and self.expand_turns:
            raise ValueError(f"`expand_turns` makes rows for sft, and the trainer is {self.trainer}.")


# -- rows: random ones


@dataclass(frozen=True)
class RolloutTree:
    """
    Sizes of one task: `rollouts` of `turns` turns, each of about `turn` tokens, after a system prompt.

    A quarter of a turn is input (a question, the output of a tool), the rest is the answer of the model.
    """

    rollouts: int
    turns: int
    system: int
    turn: int

    @property
    def longest(self) -> int:
        """Largest number of tokens of a row: a turn has up to 5/4 of its mean."""
        return self.system + self.turns * (self.turn + self.turn // 4)


def parse_tree(data: str) -> RolloutTree | None:
    """Parse `tree:ROLLOUTSxTURNS/SYSTEM/TURN`; `None` if `data` does not begin with `tree:`."""
    if not data.startswith("tree:"):
        return None
    match = re.fullmatch(r"tree:(\d+)x(\d+)/(\d+)/(\d+)", data)
    sizes = [int(size) for size in match.groups()] if match else [0]
    if min(sizes) < 1 or sizes[-1] < 4:
        raise ValueError(
            f"{data!r} gives no sizes: write `tree:ROLLOUTSxTURNS/SYSTEM/TURN`, such as `tree:4x8/600/80` for 4 "
            "rollouts of 8 turns of about 80 tokens behind a system prompt of 600; a turn has 4 tokens or more."
        )
    return RolloutTree(*sizes)


def parse_lengths(data: str) -> tuple[int, int, float] | None:
    """
    Parse `lengths:PROMPT/COMPLETION` or `lengths:PROMPT/COMPLETION/SPREAD`; `None` if `data` does not begin with
    `lengths:`. The default spread is 0.25.
    """
    if not data.startswith("lengths:"):
        return None
    match = re.fullmatch(r"lengths:(\d+)/(\d+)(?:/(\d*\.?\d+))?", data)
    if match is None or min(int(match[1]), int(match[2])) < 1 or float(match[3] or 0) > 1:
        raise ValueError(
            f"{data!r} gives no lengths: write `lengths:PROMPT/COMPLETION`, both of 1 token or more, and behind them "
            "`/SPREAD` of 0 to 1, if lengths shall not be within a quarter of their mean."
        )
    return int(match[1]), int(match[2]), float(match[3] or 0.25)


def synthetic_rows(data: str, trainer: str, count: int) -> Dataset | None:
    """
    Draw `count` tokenized rows for `equal`, `lengths:...` or `tree:...`; `None` for other data. A row for SFT is the
    prompt of a pair with the chosen completion.
    """
    if tree := parse_tree(data):
        return (tree_rows if trainer == "sft" else tree_pairs)(tree, count)
    if lengths := parse_lengths(data):
        pairs = pairs_of_lengths(count, *lengths)
    elif data == "equal":  # and a prompt of one token: nothing can be saved
        pairs = pairs_of_lengths(count, 1, 127, spread=0)
    else:
        return None
    if trainer != "sft":
        return pairs
    rows = [row["prompt_ids"] + row["chosen_ids"] for row in pairs]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def pairs_of_lengths(count: int, prompt: int, completion: int, spread: float = 0.25) -> Dataset:
    """Draw tokenized pairs with lengths uniform in `mean * (1 - spread)` to `mean * (1 + spread)`."""
    draw = torch.Generator().manual_seed(SEED)
    means = {"prompt_ids": prompt, "chosen_ids": completion, "rejected_ids": completion}
    lengths = {name: _draw_lengths(count, mean, spread, draw) for name, mean in means.items()}
    draw.manual_seed(SEED)
    return Dataset.from_dict({name: [_tokens(n, draw) for n in column] for name, column in lengths.items()})


def tree_rows(tree: RolloutTree, count: int) -> Dataset:
    """
    Draw tokenized rows for SFT, tree after tree: one row for each turn. It holds all earlier turns, and its labels are
    the answer of its turn.
    """
    turns = islice(_turns(tree, torch.Generator().manual_seed(SEED)), count)
    return Dataset.from_list(
        [{"input_ids": path + answer, "labels": [-100] * len(path) + answer} for path, answer in turns]
    )


def tree_pairs(tree: RolloutTree, count: int) -> Dataset:
    """Draw pairs, one for each turn of [`tree_rows`]: its answer is chosen over a random one."""
    draw = torch.Generator().manual_seed(SEED)
    turns = islice(_turns(tree, draw), count)
    return Dataset.from_list(
        [{"prompt_ids": path, "chosen_ids": answer, "rejected_ids": _turn(tree, draw)[1]} for path, answer in turns]
    )


def _turns(tree: RolloutTree, draw: torch.Generator) -> Iterator[tuple[list[int], list[int]]]:
    """Ids before the answer of each turn, and the ids of the answer: rollout after rollout, without end."""
    while True:
        system = _tokens(tree.system, draw)
        for _ in range(tree.rollouts):
            path = system
            for _ in range(tree.turns):
                question, answer = _turn(tree, draw)
                path = path + question
                yield path, answer
                path = path + answer


def _turn(tree: RolloutTree, draw: torch.Generator) -> tuple[list[int], list[int]]:
    """Ids of the input and of the answer of a turn: together within a quarter of their mean."""
    low, high = tree.turn - tree.turn // 4, tree.turn + tree.turn // 4
    length = int(torch.randint(low, high + 1, (1,), generator=draw))
    question = length // 4
    return _tokens(question, draw), _tokens(length - question, draw)


def _draw_lengths(count: int, mean: int, spread: float, draw: torch.Generator) -> list[int]:
    low, high = max(1, int(mean * (1 - spread))), int(mean * (1 + spread))
    return torch.randint(low, high + 1, (count,), generator=draw).tolist()


def _tokens(count: int, draw: torch.Generator, vocab_size: int = 256) -> list[int]:
    # No special tokens (below 3), and by default ids that every vocabulary has.
    return torch.randint(3, vocab_size, (count,), generator=draw).tolist()


# -- rows: those of a user


def select_rows(data: str | None, settings: Settings) -> tuple[Dataset | None, str]:
    """
    Rows of a benchmark, and their name for a report.

    Args:
        data (`str`, *optional*):
            `equal`, `lengths:...` or `tree:...` of [`synthetic_rows`]; a file, a folder or a Hub id. Without it DPO
            and SFT take HH-RLHF; GRPO draws random prompts, and no rows are returned.
        settings ([`Settings`]):
            Trainer and sizes.
    """
    if data is None and settings.trainer == "grpo":
        return None, "random"
    count = settings.pairs * (settings.steps + settings.warmup)
    if data is not None and (rows := synthetic_rows(data, settings.trainer, count)) is not None:
        if settings.trainer == "grpo":
            raise ValueError(f"{data} is for dpo and sft: grpo draws its prompts without `--data`.")
        return rows, data
    return _load(data or DEFAULT_DATA, "train" if data else "test", settings), Path(data or DEFAULT_DATA).name


def _load(data: str, split: str, settings: Settings) -> Dataset:
    """Rows of a file, a folder or a Hub id, with the columns that the trainer takes."""
    kind = "parquet" if data.endswith(".parquet") else "json"
    if data.endswith((".json", ".jsonl", ".gz", ".parquet")):
        if not Path(data).is_file():
            raise FileNotFoundError(f"There is no file {data}.")
        rows = load_dataset(kind, data_files=data, split="train")
    else:
        rows = load_dataset(data, split=split)
    columns = set(rows.column_names)
    if settings.expand_turns:
        wanted = [["messages"]]
    else:
        pairs = ["chosen", "rejected"]
        wanted = {"dpo": [pairs], "grpo": [["prompt"]]}.get(
            settings.trainer, [["prompt", "completion"], ["messages"], ["text"], pairs]
        )
    taken = next((names for names in wanted if columns.issuperset(names)), None)
    if taken is None:
        needed = ", or ".join(" and ".join(f"`{name}`" for name in names) for names in wanted)
        raise ValueError(f"{data} has columns {sorted(columns)}, and {settings.trainer} needs {needed}.")
    optional = columns & {"prompt", "tools"} if "chosen" in taken else columns & {"tools"}
    return rows.select_columns([name for name in rows.column_names if name in {*taken, *optional}])


def chosen_side(rows: Dataset) -> Dataset:
    """The chosen side of pairs, as SFT trains on it; other data stays unchanged."""
    if "chosen" not in rows.column_names:
        return rows
    alone = "messages" if is_conversational(rows[0]) else "text"
    name = "completion" if "prompt" in rows.column_names else alone
    return rows.remove_columns("rejected").rename_column("chosen", name)


def texts_of(rows: Dataset) -> Iterator[str]:
    """All text of rows, plain or conversational, to train a tokenizer on."""
    for row in rows:
        for name in ("prompt", "completion", "chosen", "rejected", "messages", "text"):
            value = row.get(name) or ""
            for message in [{"content": value}] if isinstance(value, str) else value:
                yield message.get("content") or ""
                yield from (json.dumps(call) for call in message.get("tool_calls") or ())


# -- trainers


def prepare(data: Dataset | None, settings: Settings) -> BenchStep:
    """
    Build a TRL trainer with a random model, and the prepared rows (for GRPO: batches) of all steps.

    Raises:
        ValueError: If the data has too few rows.
    """
    count = settings.batch_rows * (settings.warmup + settings.steps)
    if settings.trainer == "grpo":
        return _build_grpo(data, settings, count)
    assert data is not None
    if settings.trainer == "sft":
        data = chosen_side(data)
    tokenizer = _tokenizer(data, settings)
    grouped = settings.shuffle and "group_by_prefix" in settings.variants
    # Twice as many as needed, because TRL drops pairs whose prompt fills `max_length`. Rows are grouped per epoch.
    needed = EPOCH if grouped else 2 * count
    if settings.shuffle:
        data = data.shuffle(seed=SEED)
    if settings.expand_turns:  # a training shuffles the rows of the turns, too
        data = expand_turns(data.select(range(min(len(data), EPOCH))))
        data = data.shuffle(seed=SEED) if settings.shuffle else data
    data = data.select(range(min(len(data), needed)))
    kwargs: dict[str, Any] = dict(train_dataset=data, processing_class=tokenizer, peft_config=_lora(settings))
    kwargs["args"] = _arguments(settings, max_length=settings.max_length)
    policy = _model(tokenizer, settings, SEED)
    if settings.trainer == "sft":
        trainer = trl.SFTTrainer(model=policy, **kwargs)
    else:
        reference = None if settings.lora else _model(tokenizer, settings, SEED + 1)
        trainer = _TokenizedDPO(model=policy, ref_model=reference, **kwargs)
    names = ("prompt_ids", "chosen_ids", "rejected_ids", "input_ids", "labels")
    prepared: Any = trainer.train_dataset
    rows = prepared.select_columns([name for name in names if name in prepared.column_names]).to_list()
    if len(rows) < count:
        raise _too_few(len(rows), count)
    return BenchStep(trainer, (_grouped(rows, count, settings) if grouped else rows)[:count], settings)


def _too_few(rows: int, needed: int) -> ValueError:
    return ValueError(f"The data gives {rows} rows, and {needed} are needed: fewer steps, or smaller batches.")


def _tokenizer(data: Dataset | None, settings: Settings) -> Any:
    """The tokenizer of `model`; without one a BPE trained on the text of the data, with a plain chat template."""
    if settings.model is not None:
        return transformers.AutoTokenizer.from_pretrained(settings.model)
    texts: Iterable[str] = [""]
    if data is not None and not {"prompt_ids", "input_ids"} & set(data.column_names):
        texts = texts_of(data.select(range(min(len(data), EPOCH))))
    return train_tokenizer(texts, min(ALL_SHAPES[settings.shape]["vocab_size"], 8192))


def _costs(rows: list[dict[str, Any]], settings: Settings, *, sharing: bool) -> RowCosts:
    """The tokens of the rows."""
    pairs = [("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids")]
    return dataset_costs(
        Dataset.from_list(rows), [("input_ids",)] if settings.trainer == "sft" else pairs, sharing=sharing
    )


def _sequences(row: dict[str, Any], settings: Settings) -> list[list[int]]:
    """The token ids of each sequence of a row."""
    if settings.trainer == "sft":
        return [row["input_ids"]]
    return [[*row["prompt_ids"], *row[answer]] for answer in ("chosen_ids", "rejected_ids")]


def _grouped(rows: list[dict[str, Any]], count: int, settings: Settings) -> list[dict[str, Any]]:
    """
    Rows of the first steps of an epoch with `group_by_prefix`.

    Warmup rows come first. The counted rows are shuffled, so that variants without grouping have random batches of the
    same rows.
    """
    draw = random.Random(SEED)
    order = draw.sample(range(len(rows)), len(rows))
    costs = _costs([rows[i] for i in order], settings, sharing=True)
    grouped = [order[i] for i in group_rows(costs, settings.pairs)]
    begin = settings.warmup * settings.pairs
    warmup, counted = grouped[:begin], grouped[begin:count]
    draw.shuffle(counted)
    return [rows[i] for i in [*warmup, *counted]]


class _TokenizedDPO(trl.DPOTrainer):
    """DPO that leaves tokenized pairs as they are."""

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset if "prompt_ids" in (dataset.column_names or []) else super()._prepare_dataset(dataset, *args)


class _OfflineGRPO(trl.GRPOTrainer):
    """GRPO on completions that exist already: loss and backward, no generation."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch


def _build_grpo(data: Dataset | None, settings: Settings, count: int) -> BenchStep:
    """GRPO on prompts of the data, or random ones, with `generations` random completions each."""
    tokenizer = _tokenizer(data, settings)
    needed, draw = settings.pairs * count, torch.Generator().manual_seed(SEED)
    if data is None:
        prompts = [_tokens(n, draw) for n in _draw_lengths(needed, settings.prompt_length, 0.25, draw)]
    else:
        if len(data) < needed:
            raise _too_few(len(data), needed)
        rows = data.shuffle(seed=SEED).select(range(needed))
        render = tokenizer.apply_chat_template if is_conversational(rows[0]) else tokenizer
        options = {"add_generation_prompt": True, "return_dict": True} if is_conversational(rows[0]) else {}
        prompts = [render(row["prompt"], **options)["input_ids"] for row in rows]
    trainer = _OfflineGRPO(
        model=_model(tokenizer, settings, SEED),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=_arguments(
            settings,
            per_device_train_batch_size=settings.pairs * settings.generations,
            num_generations=settings.generations,
            max_completion_length=2 * settings.completion_length,
            beta=0.0,
        ),
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=tokenizer,
        peft_config=_lora(settings),
    )
    trainer.data_collator = lambda rows: deepcopy(rows[0])  # a row is a whole batch
    vocab_size = len(tokenizer) if settings.model else ALL_SHAPES[settings.shape]["vocab_size"]
    batches = [_random_completions(part, settings, vocab_size, draw) for part in _in_parts(prompts, settings.pairs)]
    return BenchStep(trainer, batches, settings)


def _random_completions(
    prompts: list[list[int]], settings: Settings, vocab_size: int, draw: torch.Generator
) -> dict[str, torch.Tensor]:
    """
    Draw a batch as TRL's online trainers score it: prompts padded on the left, `generations` completions of each
    padded on the right.
    """
    repeated = [prompt for prompt in prompts for _ in range(settings.generations)]
    lengths = _draw_lengths(len(repeated), settings.completion_length, 0.25, draw)
    batch = {"advantages": torch.rand(len(repeated), generator=draw) + 0.5}  # none is 0: each one has a gradient
    completions = [_tokens(n, draw, vocab_size) for n in lengths]
    for name, rows, side in (("prompt", repeated, "left"), ("completion", completions, "right")):
        ids = [torch.tensor(row) for row in rows]
        batch[f"{name}_ids"] = pad(ids, padding_side=side)
        batch[f"{name}_mask"] = pad([torch.ones_like(row) for row in ids], padding_side=side)
    return batch | {"num_items_in_batch": batch["completion_mask"].sum()}


def _arguments(settings: Settings, **more: Any) -> Any:
    config = {"dpo": trl.DPOConfig, "sft": trl.SFTConfig, "grpo": trl.GRPOConfig}[settings.trainer]
    common: dict[str, Any] = dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=settings.pairs,
        gradient_checkpointing=settings.gradient_checkpointing,
        bf16=settings.dtype == "autocast",
        use_cpu=settings.device == "cpu",
        report_to=[],
        seed=SEED,
    )
    return config(**common | more)


def _model(tokenizer: Any, settings: Settings, seed: int) -> Any:
    shape = dict(ALL_SHAPES[settings.shape])
    shape["vocab_size"] = max(shape["vocab_size"], len(tokenizer))
    options: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": settings.weights_dtype}
    if settings.model is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(settings.model, **options).to(settings.device)
    with torch.device(settings.device):  # random numbers for a large model take minutes on a CPU
        build = _build_hybrid if settings.shape in HYBRID_SHAPES else build_qwen2
        model: Any = build(tokenizer, **shape, seed=seed, **options)
        return model.to(settings.device, settings.weights_dtype)


def _build_hybrid(tokenizer: Any, *, seed: int, layers: int, heads: int, kv_heads: int, **fields: Any) -> Any:
    """A random text model of Qwen3.5: every fourth layer is attention, the others are linear attention."""
    size = fields["hidden_size"] // heads
    config = transformers.Qwen3_5TextConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        **fields,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.Qwen3_5ForCausalLM(config)


def _lora(settings: Settings) -> Any:
    if not settings.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=settings.lora, target_modules="all-linear", task_type="CAUSAL_LM")


# -- steps


class BenchStep:
    """
    A training step of a TRL trainer, to be run on batches of prepared rows.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer of TRL, with its models.
        rows (`list[dict]`):
            Rows as the trainer has prepared them; for GRPO each is a batch.
        settings ([`Settings`]):
            Settings that the trainer was built with.
    """

    def __init__(self, trainer: Any, rows: list[dict[str, Any]], settings: Settings):
        self.trainer, self.rows, self.settings = trainer, rows, settings
        self.compiled: dict[Any, Any] = {}  # compiled layers, reused by all steps
        if settings.gradient_checkpointing:  # `Trainer.train` is not called here, so these lines do what it does
            trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        if settings.dtype == "autocast":  # TRL has prepared the reference already
            trainer.model = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        weights = [p for p in trainer.model.parameters() if p.requires_grad]
        # No step changes the weights, so all variants have equal ones; the arithmetic is that of any learning rate.
        trainer.optimizer = torch.optim.AdamW(weights, lr=0.0, weight_decay=0.0)

    @property
    def models(self) -> list[torch.nn.Module]:
        has_reference = self.settings.trainer == "dpo" and self.trainer.ref_model is not None
        return [self.trainer.model, *([self.trainer.ref_model] if has_reference else [])]

    def collate(self, rows: list[int], variant: Variant = VARIANTS["trl"]) -> dict[str, torch.Tensor]:
        """The batch of some rows on the CPU: always of new tensors, of which no earlier step has kept a layout."""
        collator = self.trainer.data_collator
        if variant.flat:
            collator = replace(collator, padding_free=True)
        return collator([self.rows[i] for i in rows])

    def to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Move a batch to the device of the trainer. Online trainers of TRL override the method with generation."""
        return transformers.Trainer._prepare_inputs(self.trainer, batch)  # type: ignore[return-value]

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        """
        Number of items that the loss averages over: pairs, for SFT labelled tokens, for GRPO completions. Losses of
        batches that divide the same rows differently are compared by their means with these weights.
        """
        if "labels" in batch:
            return int((batch["labels"][:, 1:] != -100).sum())
        # DPO batches hold 2 rows per pair: all chosen ones, then all rejected ones.
        return len(next(iter(batch.values()))) // (2 if "input_ids" in batch else 1)

    def run(self, rows: list[int], variant: Variant) -> dict[str, float]:
        """Run a step and return its seconds, loss, gradient norm and projection, and on CUDA its peak memory."""
        cuda = self.settings.device == "cuda"
        batch = self.to_device(self.collate(rows, variant))
        wait(self.settings.device)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = self.forward_and_backward(batch)
        self.trainer.optimizer.step()
        wait(self.settings.device)
        figures = {"seconds": time.perf_counter() - start, "loss": loss.item()}
        if cuda:
            figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        figures["grad_norm"] = torch.stack(torch._foreach_norm(gradients)).norm().item()
        figures["grad_projection"] = sum(_projected(g) for g in gradients)
        self.trainer.optimizer.zero_grad()
        return figures

    def forward_and_backward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.trainer.training_step(self.trainer.model, batch, None)

    def kept_mib(self, rows: list[int], variant: Variant) -> float:
        """MiB that live between the forward of a step and its backward on CPU, beyond those before it."""
        batch = self.to_device(self.collate(rows, variant))
        options = {"activities": [torch.profiler.ProfilerActivity.CPU], "profile_memory": True}
        with profiled(**options) as profile, self.trainer.compute_loss_context_manager():
            loss = self.trainer.compute_loss(self.trainer.model, batch)
        del loss  # lives until here, and its graph with it
        return live_bytes(profile)[-1] / 2**20

    def peak_gib(self, rows: list[int], variant: Variant) -> float:
        """Peak memory of a step on CPU, in GiB: models, optimizer state, and the largest sum of live allocations."""
        with profiled(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self.run(rows, variant)
        state = [v for s in self.trainer.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        permanent = [*state, *(p for model in self.models for p in model.parameters())]
        return (max(live_bytes(profile)) + sum(t.numel() * t.element_size() for t in permanent)) / 2**30


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def profiled(**options: Any) -> Any:
    """Torch's profiler without its log."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # must be set before the first profile of the process
    return torch.profiler.profile(**options)


def live_bytes(profile: Any) -> list[int]:
    """Sum of the allocations of a profile that live after each event."""
    # A positive number of bytes is an allocation, a negative one a release.
    changes = (event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    return [0, *accumulate(changes)]


def _projected(gradient: torch.Tensor) -> float:
    """
    Dot product of a gradient with a fixed vector.

    It is linear in the gradient. If two variants divide the same rows into different batches, the sums of their
    projections must agree, and no gradient has to be stored.
    """
    flat = gradient.flatten()
    # Cosines of 0, 1, 2, ...: no two entries have the same weight, and no random state is needed.
    return torch.dot(flat.float(), torch.arange(len(flat), device=flat.device).float().cos()).item()


def head_as_on_gpu() -> contextlib.AbstractContextManager[Any]:
    """A block in which TRL's LM head scores only positions with a label. On a CPU it would score all of them."""
    return mock.patch("trl.trainer.utils._use_triton", return_value=True, create=True)


@contextlib.contextmanager
def attached(step: BenchStep, variant: Variant) -> Iterator[list[PaddingRemoval]]:
    """Attach a variant to the models of a step within the block. Yields their handles, the policy's first."""
    handles: list[PaddingRemoval] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(head_as_on_gpu())
        for model in step.models if variant.packed else ():
            handle = stack.enter_context(remove_padding(model, prefix_sharing=variant.shares))
            handles.append(handle)
            if variant.compiled:
                reasons = compile_layers(handle, backend=step.settings.compile_backend, compiled=step.compiled)
                if reasons:
                    raise RuntimeError(f"{len(reasons)} layers cannot be compiled: {next(iter(reasons.values()))}.")
        yield handles


def decoder_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of the decoder for a batch; GRPO stores prompts and completions apart."""
    if "input_ids" in batch:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}
    return {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
    }


# -- batches of a variant


Batches = list[list[int]]
"""Rows of each batch, as indices into the prepared rows of a step."""


def divide_rows(step: BenchStep, variant: Variant, counted: Batches) -> Batches:
    """Divide the counted rows into the batches of a variant."""
    settings = step.settings
    if variant.has_trls_batches:
        return counted
    rows = [i for batch in counted for i in batch]
    if variant.batching == "packed":
        packed = _packed_by_trl([len(step.rows[i]["input_ids"]) for i in rows], settings.max_length)
        # As many packed rows in a batch as give TRL's number of batches.
        packed_batches = _in_parts(packed, max(1, len(packed) // len(counted)))
        batches = [[rows[i] for packed_row in batch for i in packed_row] for batch in packed_batches]
    elif variant.batching == "grouped":
        lengths = [max(map(len, _sequences(step.rows[i], settings))) for i in rows]
        longest_first = sorted(range(len(rows)), key=lambda i: -lengths[i])
        batches = _in_parts([rows[i] for i in longest_first], settings.pairs)
    else:
        costs = _costs([step.rows[i] for i in rows], settings, sharing=bool(variant.shares))
        parts = _in_parts(group_rows(costs, settings.pairs).tolist(), settings.pairs)
        batches = [[rows[i] for i in part] for part in parts]
    # Sorted by length or prefix, the first batches would be the largest while the machine warms up.
    random.Random(SEED).shuffle(batches)
    return batches


def _in_parts(items: Sequence[T], size: int) -> list[list[T]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


def _packed_by_trl(lengths: list[int], max_length: int) -> Batches:
    """Indices of the rows that TRL's `packing=True` concatenates to each row of at most `max_length` tokens."""
    # TRL returns ids only. With the index of its row as each id, the first id of each sequence names the row.
    numbered = Dataset.from_dict({"input_ids": [[i] * length for i, length in enumerate(lengths)]})
    packed: Any = trl.pack_dataset(numbered, max_length)
    result = []
    for ids, lengths_in_row in zip(packed["input_ids"], packed["seq_lengths"], strict=True):
        starts = [0, *accumulate(lengths_in_row)][:-1]
        result.append([ids[start] for start in starts])
    return result


# -- measuring


Figures = dict[str, float]
"""Figures of one step: its time, loss, gradient, tokens and weight."""


@dataclass
class VariantResult:
    """Figures of a variant over all counted rows."""

    name: str
    seconds: float  # median step
    low: float  # fastest step
    high: float  # slowest step
    total_seconds: float  # all counted steps
    # TRL's `seconds` / `seconds`; with other batches than TRL's, of `total_seconds`; `None` without TRL
    speedup: float | None
    has_trls_batches: bool
    steps: int
    tokens: int  # computed by the decoder in one forward of each batch
    tokens_per_second: float  # real tokens of all rows / seconds of all steps
    token_limit: float  # TRL's padded tokens / `tokens`: the speedup if time were proportional to tokens
    loss: float  # mean over rows, for SFT over labelled tokens
    grad_norm: float  # mean over steps
    step_seconds: list[float] = field(repr=False)
    peak_gib: float | None = None  # peak memory of the largest step
    kept_mib: float | None = None  # live after the forward of the largest step; on CPU only


def measure(step: BenchStep, deadline: float | None = None) -> list[VariantResult]:
    """
    Measure all variants of the settings.

    Args:
        step ([`BenchStep`]):
            Step of [`prepare`].
        deadline (`float`, *optional*):
            Value of `time.monotonic()` after which no batch is begun. Variants with other batches than TRL's are then
            left out, because they had other rows.

    Raises:
        WrongNumbersError: If losses or gradients of the variants differ.
        TimeoutError: If no counted batch was done before the deadline.
    """
    settings = step.settings
    fixed = _in_parts(range(len(step.rows)), settings.batch_rows)
    warmup, counted = fixed[: settings.warmup], fixed[settings.warmup :]
    plans = {name: warmup + divide_rows(step, VARIANTS[name], counted) for name in settings.variants}
    figures, rounds = _time_steps(step, plans, deadline)
    variants = [VARIANTS[name] for name in plans]
    if rounds < max(map(len, plans.values())):
        counted = counted[: max(0, rounds - settings.warmup)]
        variants = [v for v in variants if v.has_trls_batches]
        figures = {v.name: figures[v.name][: len(counted)] for v in variants}
    if not counted:
        raise TimeoutError("No counted step was done in the time that there was.")
    _check_equal(figures, TOLERANCE[settings.computed_dtype])
    padded = sum(decoder_inputs(step.collate(rows))["input_ids"].numel() for rows in counted)  # of TRL's batches
    results = [_result(v, figures, padded, settings) for v in variants]
    if settings.memory and settings.device == "cpu":  # on CUDA the timed steps report it
        for variant, result in zip(variants, results, strict=True):
            largest = max(range(result.steps), key=lambda i: figures[variant.name][i]["tokens"])
            rows = plans[variant.name][settings.warmup + largest]
            with attached(step, variant):
                result.peak_gib, result.kept_mib = step.peak_gib(rows, variant), step.kept_mib(rows, variant)
    return results


def _time_steps(
    step: BenchStep, plans: dict[str, Batches], deadline: float | None
) -> tuple[dict[str, list[Figures]], int]:
    """
    Run the planned batches of each variant, interleaved batch by batch, until the deadline.

    Returns:
        `tuple`: Figures of the counted steps of each variant, and the number of complete rounds.
    """
    variants = [VARIANTS[name] for name in plans]
    figures: dict[str, list[Figures]] = {name: [] for name in plans}
    rounds, last = 0, max(map(len, plans.values()))
    while rounds < last and (deadline is None or time.monotonic() <= deadline):
        # Rotated, so that each variant runs in each place equally often: after another one caches are warm.
        shift = rounds % len(variants)
        for variant in variants[shift:] + variants[:shift]:
            if rounds >= len(plans[variant.name]):  # other batches can be fewer than the fixed ones
                continue
            if sys.stderr.isatty():
                print(f"\r{rounds + 1} of {last}: {variant.name:24}", end="", file=sys.stderr, flush=True)
            rows = plans[variant.name][rounds]
            with attached(step, variant) as handles:
                step_figures = step.run(rows, variant)
            if rounds >= step.settings.warmup:
                figures[variant.name].append(step_figures | _counts(step, variant, rows, handles))
        rounds += 1
    if sys.stderr.isatty():
        print("\r" + " " * 40, end="\r", file=sys.stderr)
    return figures, rounds


def _counts(step: BenchStep, variant: Variant, rows: list[int], handles: list[PaddingRemoval]) -> Figures:
    """Tokens that a forward of the decoder computed for a batch, its real tokens, and its weight in the loss."""
    batch = step.collate(rows, variant)
    if variant.flat:
        tokens = real = batch["input_ids"].numel()
    else:
        mask = decoder_inputs(batch)["attention_mask"]
        tokens, real = mask.numel(), int(mask.sum())
    if handles:
        stats = handles[0].stats
        if stats.padded_forwards:
            raise RuntimeError(f"{stats.padded_forwards} forwards of {variant.name} could not be packed.")
        tokens = stats.packed_tokens // stats.forwards
    return {"tokens": tokens, "real": real, "weight": step.weight(batch)}


def _result(
    variant: Variant, figures: dict[str, list[Figures]], padded_tokens: int, settings: Settings
) -> VariantResult:
    """Summarize the steps of a variant beside TRL's. On CPU memory is added later."""
    steps = figures[variant.name]
    seconds = [f["seconds"] for f in steps]
    tokens = int(sum(f["tokens"] for f in steps))
    time_of_rows = statistics.median if variant.has_trls_batches else sum
    theirs = [f["seconds"] for f in figures.get("trl", [])]
    has_peak = settings.memory and settings.device == "cuda"
    return VariantResult(
        name=variant.name,
        seconds=statistics.median(seconds),
        low=min(seconds),
        high=max(seconds),
        total_seconds=sum(seconds),
        speedup=time_of_rows(theirs) / time_of_rows(seconds) if theirs else None,
        has_trls_batches=variant.has_trls_batches,
        steps=len(steps),
        tokens=tokens,
        tokens_per_second=sum(f["real"] for f in steps) / sum(seconds),
        token_limit=padded_tokens / tokens,
        loss=_weighted(steps, "loss"),
        grad_norm=statistics.mean(f["grad_norm"] for f in steps),
        step_seconds=[round(s, 6) for s in seconds],
        peak_gib=max(f["peak_gib"] for f in steps) if has_peak else None,
    )


def _weighted(steps: list[Figures], quantity: str) -> float:
    return sum(s["weight"] * s[quantity] for s in steps) / sum(s["weight"] for s in steps)


def _check_equal(figures: dict[str, list[Figures]], tolerance: float) -> None:
    """Raise a [`WrongNumbersError`] if a variant's loss or gradient differs from the first one's."""
    first, baseline = next(iter(figures.items()))
    for name, steps in figures.items():
        values = []
        if VARIANTS[name].has_trls_batches:
            for i, (ours, theirs) in enumerate(zip(steps, baseline, strict=True)):
                values += [(f"step {i}", q, ours[q], theirs[q]) for q in ("loss", "grad_norm")]
        for quantity in ("loss", "grad_projection"):
            values.append(("all rows", quantity, _weighted(steps, quantity), _weighted(baseline, quantity)))
        for where, quantity, ours, theirs in values:
            # A projection can be near 0 for a large gradient, so its difference is relative to the norm.
            scale = baseline[0]["grad_norm"] if quantity == "grad_projection" else abs(theirs)
            difference = abs(ours - theirs) / scale
            if not difference <= tolerance:  # not `>`: NaN must fail
                raise WrongNumbersError(
                    f"{name} is not the same computation: in {where} its {quantity} is {ours:.6g} and that of {first} "
                    f"{theirs:.6g}, {difference:.1e} apart (at most {tolerance:.0e})."
                )


# -- the command


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--data",
        help="file, folder or Hub id of pairs (sft: also texts or conversations; grpo: prompts); or 'equal', "
        "'lengths:PROMPT/COMPLETION' ('.../SPREAD': up to this share from the mean, by default 0.25), or "
        "'tree:ROLLOUTSxTURNS/SYSTEM/TURN': a row or pair for each turn; by default the test split of "
        f"{DEFAULT_DATA}, for grpo random prompts",
    )
    add("--trainer", choices=TRAINERS, default="dpo", help="sft: on what was chosen; grpo: on random completions")
    add("--pairs", type=_positive, default=8, help="pairs per batch; with sft rows, with grpo prompts")
    add("--steps", type=_positive, default=10, help="counted steps")
    add("--warmup", type=int, default=2, help="steps before them")
    add(
        "--variants",
        default="trl,padding_free,prefix_sharing",
        help=f"of {', '.join(VARIANTS)}; trl comes first, and may be left out",
    )
    add("--max-length", type=_positive, help="tokens of the longest row; by default 1024, of a tree its own")
    add("--shape", choices=ALL_SHAPES, default="small", help="of Qwen2; hybrid: of Qwen3.5")
    add("--model", help="folder or Hub id of a model, in place of a random one")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one")
    add("--dtype", choices=["float32", "bfloat16", "autocast"], default="float32", help="autocast: TRL's default")
    add("--gradient-checkpointing", action="store_true", help="as TRL does by default")
    add("--expand-turns", action="store_true", help="with sft: a row for each turn of the assistant in `messages`")
    add("--group-by-prefix", action="store_true", help="also batches of rows that begin alike, as training draws them")
    add("--no-memory", action="store_true", help="measure no peak memory; on CPU it takes one more step each")
    add("--json", help="write the figures to this file; '-': to standard output")
    return parser, parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def settings_of(options: argparse.Namespace) -> Settings:
    """Settings of the options; raises a `ValueError` if they cannot be measured."""
    tree = parse_tree(options.data or "")
    variants = options.variants.split(",")
    if options.group_by_prefix and "group_by_prefix" not in variants:
        variants.append("group_by_prefix")
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise ValueError("`--device cuda`: there is no CUDA GPU here, or this torch was built without CUDA.")
    return Settings(
        trainer=options.trainer,
        variants=tuple(variants),
        pairs=options.pairs,
        steps=options.steps,
        warmup=options.warmup,
        shape=options.shape,
        model=options.model,
        device={"auto": "cuda" if has_gpu else "cpu"}.get(options.device, options.device),
        dtype=options.dtype,
        max_length=options.max_length or max(tree.longest if tree else 0, 1024),
        memory=not options.no_memory,
        gradient_checkpointing=options.gradient_checkpointing,
        expand_turns=options.expand_turns,
        shuffle=tree is None or options.group_by_prefix,
    )


def describe(settings: Settings, data: str) -> dict[str, Any]:
    """Settings, machine and versions: without them a figure cannot be compared with others."""
    device = torch.cuda.get_device_name() if settings.device == "cuda" else platform.processor() or platform.machine()
    versions = {"trl_padfix": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "data": data,
        "settings": asdict(settings) | {"model": settings.model and Path(settings.model).name},
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": versions | {"trl": trl.__version__, "python": platform.python_version()},
        "commit": commit(),
    }


def commit() -> str | None:
    """Commit of the checkout, and whether files were changed since; `None` without a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        run = lambda *command: subprocess.run(  # noqa: E731
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        return run("rev-parse", "HEAD") + (" with changes" if run("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def report(results: list[VariantResult], about: dict[str, Any]) -> Iterator[str]:
    """Lines of the tables. Each speedup is the ratio of the times in its table."""
    settings = Settings(**about["settings"])
    family = "Qwen3.5" if settings.shape in HYBRID_SHAPES else "Qwen2"
    model = settings.model or f"{family} shape '{settings.shape}'"
    without = " without generation" if settings.trainer == "grpo" else ""
    yield (
        f"{settings.trainer.upper()} step{without}, {settings.batch_size} of {about['data']}, {model}, "
        f"{settings.dtype}{', gradient checkpointing' * settings.gradient_checkpointing} on {about['device']}, "
        f"{about['threads']} threads"
    )
    yield ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    fixed = [result for result in results if result.has_trls_batches]
    yield from _table(fixed, "s", lambda r: f"{r.seconds:.4g}")
    if len(fixed) < len(results):
        yield f"The same {settings.pairs * settings.steps} rows in other batches, times of all of them:"
        others = [result for result in results if result.name == "trl" or not result.has_trls_batches]
        yield from _table(others, "s, all", lambda r: f"{r.total_seconds:.4g}")
    yield "s: median step; by tokens: TRL's padded tokens over those computed; GiB: peak memory; kept: MiB that"
    yield "live between forward and backward."
    yield f"loss {results[0].loss:.6f}, gradient norm {results[0].grad_norm:.6f}: equal in all variants"


def _table(results: list[VariantResult], heading: str, seconds: Any) -> Iterator[str]:
    rows = [("variant", heading, "min-max", "x TRL", "by tokens", "tok/s", "GiB", "kept")]
    for r in results:
        rows.append(
            (
                r.name,
                seconds(r),
                f"{r.low:.3g}-{r.high:.3g}",
                "-" if r.speedup is None else f"{r.speedup:.2f}",
                f"{r.token_limit:.2f}",
                f"{r.tokens_per_second:.0f}",
                "-" if r.peak_gib is None else f"{r.peak_gib:.2f}",
                "-" if r.kept_mib is None else f"{r.kept_mib:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join([name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser, options = parse_arguments(arguments)
    # transformers' warnings about deprecated fields that TRL sets; no user can change them.
    warnings.simplefilter("ignore", FutureWarning)
    transformers.logging.set_verbosity_error()
    try:
        settings = settings_of(options)
        rows, name = select_rows(options.data, settings)
        step = prepare(rows, settings)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        results = measure(step)
    except WrongNumbersError as error:
        sys.exit(str(error))
    about = describe(settings, name)
    for line in report(results, about):
        print(line, file=sys.stderr if options.json == "-" else sys.stdout)
    figures = json.dumps({**about, "variants": [asdict(result) for result in results]}, indent=2) + "\n"
    if options.json == "-":
        sys.stdout.write(figures)
    elif options.json:
        Path(options.json).write_text(figures)


if __name__ == "__main__":
    main()
