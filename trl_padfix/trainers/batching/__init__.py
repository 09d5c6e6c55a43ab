"""
The rows of an optimizer step: token budgets (`max_tokens_per_batch`) and rows grouped by prefix.

A step under a budget:

1. `sampler.py` (`streams.py` for a streamed dataset) takes the rows of each step of TRL (`step_plan.py`). With
   `group_by_prefix` it first brings rows with a shared prefix into one step (`prefix_groups.py`). It then gives each
   process about equally many tokens. `measures.py`, `image_measures.py` and `token_costs.py` count them.
2. `budget_collator.py` splits the rows of a process into micro-batches within the budget (`bin_packing.py`), each with
   the weight of its rows in TRL's loss (`micro_batches.py`).
3. `micro_batch_budget.py` runs forward and backward of one micro-batch after another; `prefix_schedule.py` computes
   their shared prefixes once.
4. If the loss needs all rows at once, `token_budget.py` runs its forwards in sub-batches instead (`sub_batches.py`,
   `balancing_loss.py`), which are computed again in the backward pass.
5. `step_metrics.py` logs the means of the step.

`budget_checks.py` refuses configurations and losses that a budget cannot split. `claims.py` verifies `loss_reduction`,
a user's claim about a custom loss. `user_steps.py` is for code of a user that reads a step, or computes its loss.
"""
