"""
Time of the data checks beside that of TRL's preparation.

    python docs/bench/checks.py --rows 200000

TRL's preparation and the checks of its rows run in turns; their medians are compared. Pairs and texts are drawn from a
vocabulary of words, about as long as those of HH-RLHF, and tokenized by a tokenizer that is trained on them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import datasets
import trl
from datasets import Dataset

import trl_padfix
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer
from trl_padfix.trainers import dpo, sft


def texts(draw: random.Random, count: int, low: int, high: int) -> list[str]:
    words = [f"word{i}" for i in range(500)]
    return [" ".join(draw.choices(words, k=draw.randint(low, high))) for _ in range(count)]


def timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call(*args)
    return time.perf_counter() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    datasets.disable_caching()
    datasets.disable_progress_bars()
    draw, rows = random.Random(0), options.rows
    pairs = {"prompt": texts(draw, rows, 20, 120), "chosen": texts(draw, rows, 10, 60)}
    pairs["rejected"] = texts(draw, rows, 10, 60)
    tokenizer = train_tokenizer(pairs["chosen"][:200], vocab_size=800)
    settings = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": [], "max_length": 256}
    kinds = {"DPO": Dataset.from_dict(pairs), "SFT": Dataset.from_dict({"text": pairs["prompt"]})}
    for kind, data in kinds.items():
        args = getattr(trl_padfix, f"{kind}Config")(**settings)
        kwargs = {"ref_model": build_qwen2(tokenizer, **SHAPES["small"])} if kind == "DPO" else {}
        trainer = getattr(trl_padfix, f"{kind}Trainer")(
            model=build_qwen2(tokenizer, **SHAPES["small"]),
            args=args,
            train_dataset=data.select(range(8)),
            processing_class=tokenizer,
            **kwargs,
        )
        prepare = getattr(trl, f"{kind}Trainer")._prepare_dataset
        more = (args, "train") if kind == "DPO" else (args, False, None, "train")
        spent: dict[str, list[float]] = {"TRL": [], "checks": []}
        for _ in range(options.repeats):
            seconds, prepared = timed(prepare, trainer, data, tokenizer, *more)
            spent["TRL"].append(seconds)
            if kind == "DPO":
                seconds, _ = timed(dpo._report_pairs, prepared, rows, args.max_length, "train")
            else:
                seconds, _ = timed(sft._report_rows, prepared, rows, False, args.max_length, "train")
            spent["checks"].append(seconds)
        theirs, ours = (statistics.median(spent[name]) for name in ("TRL", "checks"))
        print(f"{kind}, {rows} rows: TRL {theirs:.2f} s, checks {ours:.3f} s, {100 * ours / theirs:.2f} percent")


if __name__ == "__main__":
    main()
