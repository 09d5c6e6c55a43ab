"""TPO without padding; prefix sharing computes the prompt once for three completions."""

from dataclasses import dataclass
from typing import Any

from ..trainers.data.collators import SidedCollator
from ..trainers.settings import AttentionConfig, ForwardBudgetConfig, PaddingConfig
from ..trainers.task import Task
from . import of_trl
from .tasks import ExperimentalTrainer


with of_trl("tpo"):
    import trl.experimental.tpo as trl_tpo
    from trl.experimental.tpo.tpo_trainer import DataCollatorForTriplePreference as TRLs

__all__ = ["DataCollatorForTriplePreference", "TPOConfig", "TPOTrainer"]


@dataclass
class DataCollatorForTriplePreference(SidedCollator, TRLs):
    """TRL's collator for pairs with a reference answer, padding on the side you choose."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        examples = self.without_unknown_ids(examples)
        self.refuse_empty(examples)
        return self.to_padding_side(self.without_empty_rows(super().torch_call(examples)))


class TPOTask(Task):
    """Batches of `N` examples have `3 * N` rows: chosen completions, then rejected ones, then reference answers."""

    columns = [{"chosen", "rejected", "reference"}]
    needs = "TPO needs `chosen`, `rejected` and `reference` (and `prompt`, unless all three begin with it)"
    texts = ("prompt", "chosen", "rejected", "reference")
    takes_images = False
    layout_policy = True
    rows_per_item = 3
    collators = {TRLs: DataCollatorForTriplePreference}


@dataclass
class TPOConfig(AttentionConfig, ForwardBudgetConfig, PaddingConfig, trl_tpo.TPOConfig):
    """TRL's [`~trl.experimental.tpo.TPOConfig`] with padding removal."""


class TPOTrainer(ExperimentalTrainer, trl_tpo.TPOTrainer):
    """TRL's [`~trl.experimental.tpo.TPOTrainer`] without padding."""

    task_class = TPOTask
