"""Fields for generation in evaluation."""

from dataclasses import dataclass, field
from typing import Any

from ..core.generation import check_generation_settings


__all__ = ["GeneratingConfig"]


@dataclass
class GeneratingConfig:
    """Fields of the configurations whose trainers can generate in evaluation; a mixin, in front of the others."""

    predict_with_generate: bool = field(
        default=False,
        metadata={
            "help": "Continue the prompts of the evaluation set during evaluation. `compute_metrics` then receives "
            "the generated tokens (`predictions`, padded with the pad token) and those of the data (`label_ids`, "
            "padded with -100), as `Seq2SeqTrainer` hands them over; the texts go to `generations/` in the output "
            "directory, and a few of them to the log and the trackers."
        },
    )
    generation_max_new_tokens: int = field(
        default=256, metadata={"help": "With `predict_with_generate`: tokens to generate after a prompt, at most."}
    )
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "With `predict_with_generate`: more keyword arguments of `generate`. They go before the model's "
            "own generation config: `{'do_sample': False}` for greedy decoding whatever it says."
        },
    )
    eval_generation_samples: int | None = field(
        default=None,
        metadata={
            "help": "With `predict_with_generate`: how many rows of each evaluation set to generate from, the first "
            "ones. By default all."
        },
    )
    generation_rows_shown: int = field(
        default=2,
        metadata={
            "help": "With `predict_with_generate`: how many of the generated texts an evaluation shows in the log and "
            "the trackers; 0 for none. All of them are in `generations/`."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if self.predict_with_generate:
            check_generation_settings(self)
