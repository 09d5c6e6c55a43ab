"""The work of `trl-padfix stats`: settings of an imagined training, its rows, and their token counts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..trainers.data.turns import expand_turns
from . import stats
from .data import load_rows, rename_columns, texts_of, whole_number
from .formats import ONLINE, rows_for_trainer, to_trl_format, trainer_of
from .stats import BatchTokens, Lengths, Waiting
from .stats_picture import plot
from .verdict import UNITS, Verdict, advise


__all__ = ["StatsReport", "StatsSettings", "analyze", "load_training_rows"]

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sizes of the batches whose tokens are counted."""


@dataclass(frozen=True)
class StatsSettings:
    """The training whose batches are counted; names are those of TRL's configurations and of the command line."""

    max_length: int | None
    truncation_mode: str
    batch_size: int
    accumulation: int
    max_tokens_per_batch: int | None
    expand_turns: bool
    group_by_prefix: bool
    trainer: str = ""  # empty: the one that takes the columns
    generations: int = 8
    completion_length: int = 256
    seed: int = 0

    @classmethod
    def of(cls, recipe: dict[str, Any], options: dict[str, Any]) -> StatsSettings:
        """
        Options of the command, or where they are `None` the fields of a recipe, or else defaults.

        Raises:
            ValueError: If a number of the recipe is none.
        """

        def number(option: str, field: str, default: int | None, at_least: int = 1) -> int | None:
            value = options[option]
            return whole_number(recipe, field, default, at_least) if value is None else value

        return cls(
            max_length=number("max_length", "max_length", 1024, at_least=0) or None,
            truncation_mode=options["truncation_mode"] or recipe.get("truncation_mode", "keep_start"),
            batch_size=number("batch_size", "per_device_train_batch_size", 8) or 8,
            accumulation=number("accumulation", "gradient_accumulation_steps", 4) or 4,
            max_tokens_per_batch=number("max_tokens_per_batch", "max_tokens_per_batch", None),
            **{name: options[name] or bool(recipe.get(name)) for name in ("expand_turns", "group_by_prefix")},
            **{name: options[name] for name in ("generations", "completion_length", "seed")},
            trainer=options["trainer"] or "",
        )

    @property
    def is_online(self) -> bool:
        return self.trainer in ONLINE


@dataclass(frozen=True)
class StatsReport:
    """Token counts of a dataset under some settings."""

    settings: StatsSettings
    rows: int
    lengths: dict[str, dict[str, float]]  # of each column, see [`summary`]
    truncation: dict[str, int]
    batches: list[BatchTokens]
    token_budget: int
    waiting: list[Waiting]
    verdict: Verdict
    longest: int  # tokens of the longest sequence, at least 1,024: the `--max-length` of `benchmarks/bench.py`
    kept: Lengths  # of the rows that TRL trains on

    @property
    def unit(self) -> str:
        """What batches are counted in: pairs, rows or prompts."""
        return UNITS[self.settings.trainer]

    def bench_data(self, data: str) -> str:
        """The value of `--data` of `benchmarks/bench.py`, and its options for the same rows."""
        words = [data, *(["--max-length", str(max(2, self.longest))] if self.longest != 1024 else [])]
        return shlex.join(words) + " --expand-turns" * self.settings.expand_turns

    def to_dict(self, data: str, tokenizer: str | None, measured: str | None) -> dict[str, Any]:
        """The figures for JSON; `measured` is the text of [`bench_data`], if it can be measured."""
        settings = self.settings
        names = ("trainer", "max_length", "truncation_mode", "seed")
        return {
            "data": data,
            "tokenizer": tokenizer,
            **{name: getattr(settings, name) for name in names},
            "grouped": settings.group_by_prefix,
            "lengths": self.lengths,
            "truncation": self.truncation,
            "batches": [asdict(batch) for batch in self.batches],
            "simulation": {
                "batch_size": settings.batch_size,
                "accumulation": settings.accumulation,
                "max_tokens_per_batch": self.token_budget,
            },
            "waiting": [asdict(waiting) for waiting in self.waiting],
            "verdict": self.verdict.to_dict(measured),
        }

    def draw(self, path: Path) -> None:
        """Draw lengths, a batch and the prefix tree to a PNG."""
        plot(self.kept, path, batch_size=self.settings.batch_size, seed=self.settings.seed)


def load_training_rows(
    data: str, split: str, columns: str | None, settings: StatsSettings
) -> tuple[Dataset, Iterable[str], StatsSettings]:
    """
    Load data as a trainer takes it.

    Returns:
        The rows; their texts, to train a tokenizer on (each rollout once, before `expand_turns` repeats it); and the
        settings with the trainer. Completions that are generated have no `max_length`.

    Raises:
        ValueError: If the trainer does not take such data, or not under these settings.
    """
    rows = to_trl_format(rename_columns(load_rows(data, split), columns))
    trainer = settings.trainer or ("sft" if settings.expand_turns else trainer_of(rows))
    settings = replace(settings, trainer=trainer)
    if settings.expand_turns and trainer != "sft":
        raise ValueError(f"`expand_turns` makes rows for sft, and the trainer is {trainer}.")
    if settings.group_by_prefix and settings.is_online:
        raise ValueError(f"`group_by_prefix` is for rows that are there, and {trainer} generates its completions.")
    settings = replace(settings, max_length=None if settings.is_online else settings.max_length)
    texts = texts_of(rows)
    return rows_for_trainer(expand_turns(rows) if settings.expand_turns else rows, trainer), texts, settings


def analyze(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, settings: StatsSettings, processes: Iterable[int],
    progress: bool = False,
) -> StatsReport:  # fmt: skip
    """
    Count the tokens of [`load_training_rows`], and simulate batches and processes.

    Raises:
        ValueError: If TRL would train on none of the rows.
    """
    lengths = stats.measure(rows, tokenizer, trainer=settings.trainer, progress=progress)
    if settings.is_online:
        lengths = stats.with_completions(lengths, settings.generations, settings.completion_length, settings.seed)
    kept = lengths.truncated(settings.max_length, settings.truncation_mode)
    stats.check_kept(kept)
    grouped, batch_size, seed = settings.group_by_prefix, settings.batch_size, settings.seed
    costs, order = kept.costs(), "prefix" if grouped else "random"
    budget = settings.max_tokens_per_batch or stats.memory_of(costs, batch_size, seed)
    simulated = {"batch_size": batch_size, "accumulation": settings.accumulation, "budget": budget}
    return StatsReport(
        settings=settings,
        rows=len(lengths),
        lengths=stats.summary(lengths),
        truncation=stats.truncation_counts(lengths, kept),
        batches=[stats.batch_tokens(kept, size, order=order, seed=seed) for size in BATCH_SIZES if size <= len(kept)],
        token_budget=budget,
        waiting=[stats.simulate_waiting(costs, count, **simulated, seed=seed, grouped=grouped) for count in processes],
        verdict=advise(kept, trainer=settings.trainer, batch_size=batch_size, budget=budget, seed=seed),
        longest=settings.max_length or max(1024, int(lengths.sequences.max())),
        kept=kept,
    )
