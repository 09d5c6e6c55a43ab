"""`trl-padfix parity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from typer import Option

from .console import LONGEST, JsonOption, console, device_of, one_of, outputs, write_json
from .user_errors import user_errors_of


__all__ = ["parity"]

DTYPES = ("float32", "bfloat16", "float16")
COLUMNS = ("attention", "mode", "tokens", "logps", "gradient", "packed", "")
WIDTH = 80


def parity(
    model: Annotated[str | None, Option(help="Model id or path.")] = None,
    data: Annotated[str | None, Option(help="Local file or folder, or Hub id, of TRL's formats.")] = None,
    config: Annotated[Path | None, Option(help="YAML of a training: its model, data and max_length.")] = None,
    attn: Annotated[list[str] | None, Option(help="Attention implementation; may be repeated.")] = None,
    dtype: Annotated[str, Option(help=f"{', '.join(DTYPES)}: what is compared with float32.")] = "float32",
    device: Annotated[str, Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    rows: Annotated[int, Option(min=1, help="Examples to compare on; a pair is two rows.")] = 4,
    max_length: Annotated[
        int | None, Option(min=2, max=LONGEST, help="Longest row, in tokens; 512 by default.")
    ] = None,
    gradients: Annotated[bool, Option(help="Compare gradients too.")] = True,
    json: JsonOption = None,
) -> None:
    """Compare packed with padded, and every backend with eager float32, on your model and data; 1 if they differ."""
    import platform
    from importlib.metadata import version

    import torch
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_flash_attn_2_available
    from trl.data_utils import is_conversational

    from ..tools.data import give_template, load_recipe, load_rows, whole_number
    from ..tools.parity import compare, tokenize_rows
    from ..tools.reading import TRUSTING_NOTHING, load_model, load_tokenizer
    from ..tools.stats import texts_of
    from ..tools.tiny import SHAPES, build_qwen2, train_tokenizer

    transformers.logging.disable_progress_bar()
    one_of("--dtype", dtype, DTYPES)
    outputs(json=json)
    device = device_of(device)
    with user_errors_of("--config"):
        recipe = load_recipe(str(config)) if config is not None else {}
        max_length = max_length or whole_number(recipe, "max_length", 512, at_least=2) or 512
    model = model or recipe.get("model_name_or_path")
    tiny = recipe.get("tiny_model") if model is None else None
    if tiny is not None:
        one_of("--config (tiny_model)", tiny, SHAPES)
        model = f"tiny_model {tiny}"
    if not isinstance(model, str):
        raise typer.BadParameter(
            "give a model, here or as `model_name_or_path` (or `tiny_model`) of `--config`.", param_hint="--model"
        )
    if data is None and config is None:
        raise typer.BadParameter("give the data, here or in the YAML of `--config`.", param_hint="--data")
    source = "--data" if data else "--config"
    with user_errors_of(source):
        dataset = load_rows(data or str(config))
        if tiny is not None:  # as the training builds it
            tokenizer = train_tokenizer(texts_of(dataset), SHAPES[tiny]["vocab_size"])
    if tiny is None:
        with user_errors_of("--model"):
            tokenizer = load_tokenizer(model)
    plain = give_template(tokenizer) and is_conversational(dataset[0])
    with user_errors_of(source):
        batch = tokenize_rows(dataset, tokenizer, rows, max_length)
    batch = {name: value.to(device) for name, value in batch.items()}

    def load(backend: str, precision: torch.dtype) -> torch.nn.Module:
        how = {"attn_implementation": backend, "dtype": precision}
        if tiny is not None:
            return build_qwen2(tokenizer, **SHAPES[tiny] | {"vocab_size": len(tokenizer)}, **how).to(device, precision)
        if backend == "eager":  # the yardstick comes first: what it cannot be loaded for is the model's fault
            return load_model(model, **how).to(device)
        return AutoModelForCausalLM.from_pretrained(model, **TRUSTING_NOTHING, **how).to(device)

    flash = dtype != "float32" and device == "cuda" and is_flash_attn_2_available()
    backends = attn or ["eager", "sdpa", *(["flash_attention_2"] if flash else [])]
    table = Table(*(Column(name, no_wrap=True) for name in COLUMNS), box=box.MARKDOWN)  # as an issue shows it
    failed, found = [], []
    padded = batch["attention_mask"].numel()
    with console.status("comparing"), user_errors_of("--model"):
        for c in compare(load, batch, backends, getattr(torch, dtype), gradients):
            packed = c.parity and c.parity.maximum
            found.append({**vars(c), "parity": packed})
            tokens = "-" if c.tokens is None else str(c.tokens)
            figures = [_or_dash(value) for value in (c.logps, c.gradient, packed)]
            table.add_row(c.attention, c.mode, tokens, *figures, "ok" if c.ok else "FAILED")
            if not c.ok:
                failed.append(f"{c.attention}, {c.mode}: {c.note or c.parity or 'too far from the yardstick'}")
    versions = ", ".join(f"{name} {version(name)}" for name in ("trl-padfix", "torch", "transformers", "trl"))
    lengths = batch["attention_mask"].sum(1).tolist()
    longest = max(map(len, backends))
    Console(width=WIDTH + max(0, longest - len(COLUMNS[0]))).print(table)  # a name is not cut
    typer.echo(
        f"{Path(model).name} in {dtype} on {device}, {len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens"
        f"{', conversations in a plain chat template' if plain else ''}.\n"
        "logps, gradient: largest difference of a log-probability, and relative\n"
        "difference of the gradient, from padded eager float32. packed: largest\n"
        f"difference between packed and padded.\n{versions},\nPython {platform.python_version()}."
    )
    compared = min(lengths) < max(lengths)
    if not compared:
        failed.append(
            f"There was no padding to compare: all {len(lengths)} rows have {max(lengths)} tokens. Take more rows "
            "(`--rows`), a larger `--max-length`, or other data."
        )
    write_json(
        json,
        {
            "model": Path(model).name, "device": device, "dtype": dtype, "lengths": lengths, "padded_tokens": padded,
            "versions": versions, "compared": compared, "ok": not failed, "results": found,
        },
    )  # fmt: skip
    for line in failed:
        typer.echo(line, err=True)
    if failed:
        raise typer.Exit(1)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
