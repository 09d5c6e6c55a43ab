"""CPO (and SimPO) without padding; rows are padded right, as in TRL."""

from dataclasses import dataclass

from ..trainers.settings import AttentionConfig, ForwardBudgetConfig, PackingConfig
from . import of_trl
from .tasks import JoinedPairTask, PairTrainer


with of_trl("cpo"):
    import trl.experimental.cpo as trl_cpo

__all__ = ["CPOConfig", "CPOTrainer"]


@dataclass
class CPOConfig(AttentionConfig, ForwardBudgetConfig, PackingConfig, trl_cpo.CPOConfig):
    """TRL's [`~trl.experimental.cpo.CPOConfig`] with padding removal."""


class CPOTrainer(PairTrainer, trl_cpo.CPOTrainer):
    """TRL's [`~trl.experimental.cpo.CPOTrainer`] without padding."""

    task_class = JoinedPairTask
