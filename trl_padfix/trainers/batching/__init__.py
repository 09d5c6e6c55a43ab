"""
The rows of an optimizer step: token budgets (`max_tokens_per_batch`) and rows grouped by prefix.

The way of a step under a budget:

1. `sampler.py` (`streams.py` of a streamed dataset) takes the rows of each step of TRL (`step_plan.py`), brings rows
   that begin alike into one step (`prefix_groups.py`), and gives each process about equally many tokens, which
   `measures.py`, `image_measures.py` and `token_costs.py` count.
2. `budget_collator.py` splits the rows of a process into micro-batches within the budget (`bin_packing.py`), each with
   the weight of its rows in TRL's loss (`micro_batches.py`).
3. `micro_batch_budget.py` runs forward and backward of one micro-batch after another; `prefix_schedule.py` computes
   prefixes that they have in common once.
4. If the loss needs all rows at once, `token_budget.py` runs its forwards in sub-batches instead (`sub_batches.py`,
   `balancing_loss.py`), which are computed again in the backward pass.
5. `step_metrics.py` logs the means of the step.

`budget_checks.py` says what a budget cannot be used with, `claims.py` verifies what a user claims of a loss, and
`user_steps.py` serves code of a user that computes or reads a step itself.
"""
