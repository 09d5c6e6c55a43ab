"""
A batch within a token budget (`max_tokens_per_batch`), and the order of rows (`group_by_prefix`).

1. The batch is TRL's: `row_order.py` only permutes the order of its sampler.
2. TRL's `training_step` calls `compute_loss`, and so `token_budget.py`. `row_splits.py` splits the rows of the batch:
   `token_costs.py` counts their tokens, `bin_packing.py` packs them into parts within the budget.
3. If the loss is a sum over rows with known weights (`Task.chunk_weight`), the parts are chunks: forward and backward
   of one after another, with synchronised gradients in the last. `prefix_schedule.py` computes their shared prefixes
   once, and `chunk_metrics.py` gives TRL the means of their metrics.
4. Any other loss gets the outputs of all rows. `sub_batches.py` runs its forwards in parts, which the backward
   recomputes; `balancing_loss.py` balances experts over all of them.
"""
