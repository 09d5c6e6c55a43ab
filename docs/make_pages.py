"""
Writes the generated pages: options, from the fields of the configurations, and `llms.txt`, from the pages.

    python docs/make_pages.py
    python docs/make_pages.py --check     # 1 if a page is not what it would write
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import MISSING, fields
from inspect import cleandoc
from pathlib import Path

import trl
from copied_pages import ELSEWHERE

import trl_padfix
from trl_padfix.cli import METHODS


FOLDER = Path(__file__).parent
ATTENTION = (  # a flag of TRL's model configuration
    "Attention implementation: a name, or `'auto'` (an installed FlashAttention, else `sdpa`, else `eager`). "
    '`None`: transformers chooses. For parts of a vision model: `{"text_config": "sdpa", "vision_config": "eager"}`.'
)
OPENING = """
Our configurations add these fields to TRL's. The flag `--attn_implementation` belongs to
TRL's `ModelConfig`. If your script parses no `ModelConfig`, set `args.attn_implementation` after parsing.
*Only* refers to the stable trainers.

## Fields
"""
GROUPS = {
    "Computation": (
        "padding_free", "prefix_sharing", "max_tokens_per_batch", "group_by_prefix", "packed_multiple_of",
    ),
    "Checks": ("parity_check", "strict"),
    "Attention": ("attn_implementation", "ref_attn_implementation", "teacher_attn_implementation"),
    "Data": ("expand_turns", "padding_side", "pool_last_token"),
    "Evaluation": ("predict_with_generate", "generation_max_new_tokens"),
}  # fmt: skip
"""The fields by subject, each group from those that most runs set to those that few set."""

PAGES = {
    "padding_free": "how_it_works.md",
    "prefix_sharing": "how_it_works.md#shared-prefixes",
    "max_tokens_per_batch": "token_budget.md",
    "parity_check": "numbers.md#in-your-run",
    "strict": "limits.md#runs-padded-with-a-warning",
    "packed_multiple_of": "attention.md",
    "attn_implementation": "attention.md",
    "expand_turns": "guides/rollouts.md",
}
"""What each page tells about."""

HEADER = "| field=default | type | what it does |\n|---|---|---|\n"

TYPES = {
    name: described.replace('`"auto"`', "`'auto'`")
    for config in trl_padfix.__all__
    if config.endswith("Config")
    for name, described in re.findall(
        r"^ {4}(\w+) \((.+?)(?:, \*optional\*.*)?\):$", cleandoc(getattr(trl_padfix, config).__doc__), re.MULTILINE
    )
}
"""Types of the fields, from the docstrings of our configurations."""

METRICS = """
## Metrics in the log

| metric | meaning |
|---|---|
| `padfix/pad_fraction` | padding / tokens of the padded batches |
| `padfix/shared_fraction` | repeated prefix tokens / real tokens |
| `padfix/filler_fraction` | filler / (computed tokens + filler) (with `packed_multiple_of`) |
| `padfix/padded_forwards` | padded forwards; the log gives each reason once |
| `padfix/auto_shared` | fraction of forwards that shared prefixes (with `prefix_sharing="auto"`) |
| `perf/tokens_per_second` | real tokens per second of wall time, including data loading, optimizer and generation |

The fractions cover only packed forwards. In evaluation, each name begins with `eval_`.

**GRPO, RLOO, distillation**: if you accumulate gradients without a token budget, `prefix_sharing` puts all
completions of a prompt into one micro-batch (if the loss is a sum over rows). The step stays the same, but means over
micro-batches (`entropy`, `kl`, `clip_ratio`) differ from TRL's.

## Flags and environment

| flag or variable | what it does |
|---|---|
| `trl-padfix doctor` | shows what runs here (or `--json`); exits with status 1 if `--model` cannot run |
| `--dry_run` | [checks the first batch](numbers.md#in-your-run) without training |
| `--dataset_name`, `datasets` | [your data](../recipes/README.md) |
| `--tiny_model tiny` or `small` | trains a random Qwen2 |
| `--resume_from_checkpoint` | takes `latest` or a folder ([resume](../recipes/README.md#resume)) |
| `--accelerate_config` | takes a file, or a name of TRL's; flags of `accelerate launch` work too, also in YAML |
| `TRL_PADFIX_DEBUG=1` | shows the traceback of every error |
| `TRL_PADFIX_OFF=1` | lets TRL's code compute every step (`padding_side` stays) |

Set `TRL_PADFIX_OFF=1` before you make the trainer. With a warning, it turns off the fields of computation,
`pool_last_token`, `remove_padding` and the callback.
"""

MADE = "<!-- Made by docs/make_pages.py; do not edit. -->\n\n"


def own_fields(method: str) -> dict[str, tuple[str, str]]:
    """Default and help of the fields that our configuration of a method adds to TRL's, or means more with."""
    ours, theirs = (getattr(package, f"{METHODS[method]}Config") for package in (trl_padfix, trl))
    added = {field.name for field in fields(ours)} - {field.name for field in fields(theirs)} | {"padding_free"}
    found = {f.name: (_default(f), f.metadata.get("help", "")) for f in fields(ours) if f.name in added}
    return {"padding_free": found.pop("padding_free"), **found}


def options() -> str:
    """The page of options."""
    by_name: dict[str, tuple[str, str]] = {}
    methods: dict[str, list[str]] = {}
    for method in METHODS:
        for name, described in own_fields(method).items():
            by_name.setdefault(name, described)
            methods.setdefault(name, []).append(METHODS[method])
    by_name["attn_implementation"] = ("None", ATTENTION)
    methods["attn_implementation"] = [*METHODS]
    page = "# Options\n\n" + MADE.rstrip("\n") + "\n" + OPENING
    for group, names in GROUPS.items():
        page += f"\n### {group}\n\n{HEADER}"
        for name in names:
            default, described = by_name.pop(name)
            only = "" if len(methods[name]) == len(METHODS) else f"*{', '.join(methods[name])} only.* "
            field = f"[`{name}={default}`]({PAGES[name]})" if name in PAGES else f"`{name}={default}`"
            page += f"| {field} | {TYPES[name]} | {only}{' '.join(described.split())} |\n"
    if by_name:
        raise ValueError(f"`GROUPS` lacks {', '.join(by_name)}.")
    page += METRICS
    return page


def llms() -> str:
    """The pages in the order of the navigation, each with its headings, for language models."""
    folder = Path(__file__).parent
    text = "# trl_padfix\n\n> Drop-in TRL trainers that skip padding and compute shared prompts once.\n\n"
    heading = ""
    for line in (folder.parent / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines():
        title, _, page = line.strip(" -").partition(": ")
        if not page:
            heading = f"\n## {title.rstrip(':')}\n\n"
        elif page not in ELSEWHERE:
            text, heading = text + heading, ""
            headings = re.findall(r"^## (.*)$", (folder / page).read_text(), re.MULTILINE)
            text += f"- [{title}]({page}){': ' if headings else ''}{'; '.join(headings)}\n"
    return text


MADE_PAGES = {"llms.txt": llms, "options.md": options}


def _default(field) -> str:
    if field.default is not MISSING:
        return str(field.default)
    return str(field.default_factory()) if field.default_factory is not MISSING else "required"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    check = parser.parse_args().check
    stale = [name for name, make in MADE_PAGES.items() if not _holds(FOLDER / name, make())]
    if check and stale:
        sys.exit(f"{', '.join(stale)}: not what the code says now. Run `python docs/make_pages.py`.")
    for name in stale:
        (FOLDER / name).write_text(MADE_PAGES[name]())


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    main()
