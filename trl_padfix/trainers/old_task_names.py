"""The names that members of a [`Task`] had. They go, with this file, in the next minor release."""

from __future__ import annotations

import warnings


__all__ = ["accept_old_names"]

RENAMED = {
    "attached": "on_attached",
    "averages_tokens": "loss_is_token_mean",
    "compares_rows": "needs_all_rows",
    "extremes": "min_max_metrics",
    "for_metrics": "metrics_inputs",
    "generates_for_groups": "supports_cp_generation",
    "in_pieces": "with_sub_batches",
    "joined_metrics": "merge_metrics",
    "loss_items": "num_loss_items",
    "loss_weight": "sub_batch_weight",
    "may_group": "may_regroup",
    "metric_items": "num_metric_items",
    "pools_by": "pooling_pad_id",
    "reason_not_to_split": "token_budget_obstacle",
    "sums_over_rows": "loss_is_row_sum",
}
"""Old names, each with the new one."""


def accept_old_names(task_class: type) -> None:
    """
    Take overrides in a class under their old names, with a warning; give the class its members under old names, too,
    which an override may call by `super()`.
    """
    for old, new in RENAMED.items():
        if old in vars(task_class) and new not in vars(task_class):
            warnings.warn(
                f"`{task_class.__name__}.{old}` is now called `{new}`, and the old name goes with the next minor "
                "release of trl_padfix. Rename it.",
                DeprecationWarning,
                stacklevel=3,
            )
            setattr(task_class, new, vars(task_class)[old])
        # Each class has its own: `super().old()` must find the method of the class above, not that of the override.
        elif new in vars(task_class) and old not in vars(task_class):
            setattr(task_class, old, vars(task_class)[new])
