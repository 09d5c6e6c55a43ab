"""The reference of a model that was made in the script, which TRL would look for on the Hub under an empty name."""

from __future__ import annotations

import contextlib
import copy
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, TrainingArguments

from .parts import Part, entered
from .temporary_attributes import temporarily_set


if TYPE_CHECKING:
    from .parts import PaddingFreeTrainer


__all__ = ["ReferenceCopy"]


class ReferenceCopy(Part):
    """
    Makes the reference a copy of a model without a name.

    TRL loads the reference from `config._name_or_path`, which is empty for a model that is built from a configuration.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._policy: PreTrainedModel | None = None

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        model = init_kwargs.get("model")
        if not isinstance(model, PreTrainedModel) or model.config._name_or_path or not self._trl_modules():
            return
        if init_kwargs.get("processing_class") is None:
            raise ValueError(
                f"The {type(model).__name__} was made in this script, so no folder has its tokenizer. Pass the "
                "tokenizer as `processing_class`."
            )
        self._policy = model

    def around_init(self, config: TrainingArguments) -> contextlib.AbstractContextManager[Any]:
        policy, self._policy = self._policy, None
        if policy is None:
            return contextlib.nullcontext()
        # Each trainer of TRL imports the function that loads a model into its own module.
        loading = [module for module in self._trl_modules() if hasattr(module, "create_model_from_path")]

        def patched(module: Any) -> contextlib.AbstractContextManager[Any]:
            load = module.create_model_from_path

            def load_or_copy(model_id: str, *args: Any, **kwargs: Any) -> Any:
                # The weights are those of before the first step: TRL creates the reference in its `__init__`.
                return load(model_id, *args, **kwargs) if model_id else copy.deepcopy(policy)

            return temporarily_set(module, "create_model_from_path", load_or_copy)

        return entered(map(patched, loading))

    def _trl_modules(self) -> list[ModuleType]:
        """The modules of TRL that define classes of this trainer; none for a plain `transformers.Trainer`."""
        names = (c.__module__ for c in type(self.trainer).__mro__)
        return [sys.modules[name] for name in names if name.startswith("trl.")]
