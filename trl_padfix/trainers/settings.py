"""
Fields that this package adds to TRL's configurations, their checks, and [`Settings`], which reads all of them.

Each field is declared once, in a mixin. `config.py` puts the mixins in front of TRL's classes and documents the
fields.
"""

# No `from __future__ import annotations`: TRL's parser calls `get_type_hints`, which until Python 3.10 rejects an
# `InitVar` in an annotation that is a string.
import logging
from dataclasses import InitVar, dataclass, field, fields, is_dataclass
from typing import Any

from transformers import TrainingArguments

from ..core.switch import is_off
from ..field_names import NEEDS
from .field_types import Implementation, Lengths, Sharing, parse_implementation


__all__ = [
    "COMPUTED", "AttentionConfig", "BudgetConfig", "EvaluationConfig", "ForwardBudgetConfig", "PackingConfig",
    "PaddingConfig", "ReferenceAttentionConfig", "Settings", "TeacherAttentionConfig", "check_field_types",
    "check_settings", "trls_configuration", "values_off",
]  # fmt: skip

COMPUTED = (
    "padding_free", "prefix_sharing", "packed_multiple_of", "max_tokens_per_batch", "group_by_prefix",
    "pool_last_token",
)  # fmt: skip
"""Fields that change how a step is computed."""

FLAG_TYPES = (bool, bool | None, "bool", "bool | None")
"""Types of flags. In modules with `from __future__ import annotations` the type of a field is a string."""


@dataclass
class AttentionConfig:
    """
    `attn_implementation`: the mixin in front of all others.

    Not a dataclass field, because TRL's `ModelConfig` owns the flag `--attn_implementation`. TRL's scripts parse both
    configurations with one parser, in which a flag must not be defined twice.
    """

    attn_implementation: InitVar[Implementation | None] = None

    def __post_init__(self, attn_implementation: Implementation | None) -> None:
        self.attn_implementation = parse_implementation(attn_implementation)
        for name in (f.name for f in fields(self) if f.name.endswith("_attn_implementation")):
            setattr(self, name, parse_implementation(vars(self)[name]))
        super().__post_init__()  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"attn_implementation": self.attn_implementation}  # type: ignore[misc]


@dataclass
class ReferenceAttentionConfig(AttentionConfig):
    """`attn_implementation`, and `ref_attn_implementation` for trainers with a reference model."""

    ref_attn_implementation: dict[str, Any] | str | None = None


@dataclass
class TeacherAttentionConfig(AttentionConfig):
    """`attn_implementation`, and `teacher_attn_implementation` for trainers with a teacher model."""

    teacher_attn_implementation: dict[str, Any] | str | None = None


@dataclass
class PackingConfig:
    """Fields of every configuration of this package: a mixin in front of TRL's class."""

    is_read = False  # not annotated: no field
    """Whether a trainer of this package has read the fields. Each instance has its own value."""

    padding_free: bool = False
    prefix_sharing: Sharing = field(default=False, metadata=dict(nargs="?", const=True, metavar="auto|true|false"))
    parity_check: bool = True
    strict: bool = False
    packed_multiple_of: Lengths | None = None

    def __post_init__(self) -> None:
        check_settings(Settings.of(self), self)
        super().__post_init__()  # type: ignore[misc]

    def get_warmup_steps(self, num_training_steps: int) -> int:
        # Trainers of every package call it when they begin.
        if not self.is_read and (names := Settings.of(self).changed - {*vars(trls_configuration(self))}):
            logging.getLogger(__name__).warning(
                f"A trainer of another package got this `{type(self).__name__}` of trl_padfix and does not know "
                f"{', '.join(f'`{name}`' for name in sorted(names))}. Import the trainer from trl_padfix."
            )
        return super().get_warmup_steps(num_training_steps)  # type: ignore[misc]


@dataclass
class PaddingConfig(PackingConfig):
    """[`PackingConfig`] and `padding_side`, for trainers with a collator."""

    padding_side: str | None = field(default=None, metadata={"choices": ["left", "right"]})


@dataclass
class ForwardBudgetConfig:
    """`max_tokens_per_batch` for the forwards of a batch: a mixin in front of [`PackingConfig`]."""

    max_tokens_per_batch: int | None = None


@dataclass
class BudgetConfig(ForwardBudgetConfig):
    """`max_tokens_per_batch` and `group_by_prefix`, for trainers that train on the rows of a dataset."""

    group_by_prefix: bool = False


@dataclass
class EvaluationConfig:
    """Fields for evaluation by generation: a mixin in front of [`BudgetConfig`]."""

    predict_with_generate: bool = False
    generation_max_new_tokens: int = 256


@dataclass
class Settings(TeacherAttentionConfig, ReferenceAttentionConfig, EvaluationConfig, BudgetConfig, PaddingConfig):
    """
    All our fields of a configuration, read once. A field that the configuration does not have gets its default.

    The mixins give fields and defaults; their checks are skipped, because `check_arguments` checks the configuration.
    """

    pool_last_token: bool = False
    expand_turns: bool = False

    @property
    def changed(self) -> set[str]:
        """Our fields that differ from their defaults. Without any, no code of ours acts."""
        return {name for name, value in vars(self).items() if value != vars(Settings())[name]}

    def __post_init__(self, attn_implementation: Implementation | None) -> None:
        self.attn_implementation = attn_implementation

    @classmethod
    def of(cls, config: TrainingArguments, **fixed: Any) -> "Settings":
        """Read a configuration of this package, of TRL or of transformers; the values in `fixed` override it."""
        names = {"attn_implementation", *(f.name for f in fields(cls))}  # `fields` leaves out an `InitVar`
        if not isinstance(config, EvaluationConfig):  # `Seq2SeqTrainingArguments` have fields of these names
            names -= {f.name for f in fields(EvaluationConfig)}
        settings = cls(**{name: getattr(config, name) for name in names if hasattr(config, name)} | fixed)
        vars(settings).update(values_off(settings))
        return settings


def trls_configuration(config: TrainingArguments) -> Any:
    """A copy of a configuration of this package as TRL's class, without our fields; any other one unchanged."""
    package = __name__.partition(".")[0]
    theirs = next(c for c in type(config).__mro__ if c.__module__.partition(".")[0] != package)
    if theirs is type(config):  # also a user's subclass of ours
        return config
    copied = object.__new__(theirs)
    ours = {f.name for f in fields(config)} - {f.name for f in fields(theirs)}
    ours |= {"attn_implementation", "is_read"}
    copied.__dict__.update({name: value for name, value in vars(config).items() if name not in ours})
    return copied


def values_off(config: TrainingArguments | PackingConfig | None) -> dict[str, Any]:
    """
    With `TRL_PADFIX_OFF` set, the values of the fields of our configuration that change how a step is computed.

    Fields that choose rows, metrics or the attention stay: the training is the same one, computed by TRL.
    """
    names = COMPUTED & vars(config).keys() if is_off() and isinstance(config, PackingConfig) else ()
    return {name: Settings.__dataclass_fields__[name].default for name in names}


def check_field_types(config: TrainingArguments) -> None:
    """Raise a `TypeError` for our flags given as strings, because Python treats any non-empty string as true."""
    if not is_dataclass(config):
        return
    for flag in (f for f in fields(config) if f.type in FLAG_TYPES and f.name in Settings.__dataclass_fields__):
        if (value := vars(config)[flag.name]) not in (None, False, True):
            raise TypeError(f"`{flag.name}={value!r}` is of type `{type(value).__name__}`; a flag is True or False.")


def check_settings(settings: Settings, config: TrainingArguments) -> None:
    """
    Check our fields of a configuration, which `settings` holds. The configuration calls it when it is created, and a
    trainer again, for fields that were set later.

    Raises:
        TypeError, ValueError: For a value that is invalid, alone or with another field of the configuration.
    """
    from .data.collators import check_padding_side
    from .data.turns import check_turn_settings

    check_field_types(config)
    check_padding_side(settings.padding_side, optional=True)
    check_packing(settings)
    check_token_budget(settings.max_tokens_per_batch, config)
    check_grouping(settings, config)
    if settings.expand_turns:
        check_turn_settings(config)
    if settings.predict_with_generate and settings.generation_max_new_tokens < 1:
        raise ValueError(f"`generation_max_new_tokens` must be positive, got {settings.generation_max_new_tokens}.")


def check_packing(settings: Settings) -> None:
    """
    Raises:
        ValueError: If a field has an unknown value, if one of [`NEEDS`] is set without the field that it needs,
            and if a token budget is not a multiple of `packed_multiple_of`.
    """
    from ..core.handle import check_multiple, check_prefix_sharing
    from ..core.layout.layout import packed_length

    check_prefix_sharing(settings.prefix_sharing)
    check_multiple(multiple := settings.packed_multiple_of)
    for name, (other, reason) in NEEDS.items():
        value = vars(settings)[name]
        if value and not vars(settings)[other]:
            raise ValueError(f"`{name}={value!r}` needs `{other}=True`: {reason}. Set both, or neither.")
    budget = settings.max_tokens_per_batch
    if multiple is not None and isinstance(budget, int) and (length := packed_length(budget, multiple)) != budget:
        raise ValueError(
            f"`max_tokens_per_batch={budget}` is not a {'multiple' if isinstance(multiple, int) else 'length'} of "
            f"`packed_multiple_of={multiple}`: a full sub-batch would be lengthened to {length} tokens. Set the "
            "budget to that number, or use a smaller multiple."
        )


def check_token_budget(budget: int | None, config: TrainingArguments) -> None:
    """
    Raises:
        ValueError: If `max_tokens_per_batch` is not a number of tokens, or with `packing` or NEFTune.
    """
    if budget is None:
        return
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise ValueError(f"`max_tokens_per_batch` must be an integer number of tokens above 0, got {budget!r}.")
    if vars(config).get("packing") and config.packing_strategy != "wrapped":
        raise ValueError(
            "`packing=True` joins the rows of a batch, which `max_tokens_per_batch` cannot split. Lower "
            "`per_device_train_batch_size` and raise `gradient_accumulation_steps` instead: the step is the same."
        )
    if (alpha := config.neftune_noise_alpha) is not None:
        raise ValueError(
            f"`neftune_noise_alpha={alpha}` adds noise whose size depends on the length of a padded batch, and "
            "`max_tokens_per_batch` changes the batches. Leave `max_tokens_per_batch` out."
        )


def check_grouping(settings: Settings, config: TrainingArguments) -> None:
    """
    Raises:
        ValueError: If `group_by_prefix` is set with `packing` or with another order of rows.
    """
    if not settings.group_by_prefix:
        return
    given = vars(config)
    if given.get("packing"):
        raise ValueError(
            "`packing=True` joins rows before `group_by_prefix` could put those with a common prefix together. "
            "Set only one of `packing` and `group_by_prefix`."
        )
    strategy = given.get("train_sampling_strategy", "random")
    strategy = "group_by_length" if given.get("group_by_length") is True else strategy
    if strategy not in ("random", "sequential"):
        raise ValueError(
            f"`group_by_prefix=True` and `{strategy}` both choose which rows meet in a step: by prefix and by length. "
            "Set one of them; `max_tokens_per_batch` balances lengths anyway."
        )
