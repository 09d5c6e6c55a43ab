"""
A batch within a token budget (`max_tokens_per_batch`), and the order of rows (`group_by_prefix`).

How a step of DPO with a budget runs, call by call:

1. TRL's sampler and collator make the batch. `row_order.py` only permutes the sampler's order.
2. `training_step` (`../base.py`) is TRL's, within `TokenBudget.around_training_step`. TRL calls `compute_loss`, which
   runs within `observe_step`: the parts of the trainer that act in steps, in the order of `PARTS`.
3. `PaddingFreeMixin.compute_loss` calls `TokenBudget.compute_loss` (`token_budget.py`). `RowSplitter.split` finds
   the rows of each part: it counts their tokens and packs them within the budget (`bin_packing.py`).
4. If the loss is a sum over rows with known weights (`chunk_weight` of the task, `../methods/dpo.py`), the parts are
   chunks: each runs TRL's `compute_loss` and a backward; gradients are synchronized in the last.
   `chunk_metrics.py` gives TRL the means of their metrics.
5. Any other loss gets the outputs of all rows: its forwards run in parts, which the backward recomputes.
   `merged_output.py` merges their outputs, `balancing_loss.py` balances experts over all of them.
6. `part_runner.py` runs the forwards of both. `prefix_schedule.py` computes the prefixes that the parts share once.

Without a budget `TokenBudget.compute_loss` passes the batch to TRL's `compute_loss`, within `observe_step`.
"""
