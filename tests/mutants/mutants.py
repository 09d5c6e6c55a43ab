"""
The faults: each replaces one text, which occurs once in one file of `trl_padfix/`, by another one.

If code that a fault is in was rewritten, `test_mutants.py` names the fault. Find the place that now does what its line
says, and take the shortest text there that occurs once. A mutant that changes no number is replaced by another one.
"""

from __future__ import annotations

from typing import NamedTuple


__all__ = ["MUTANTS", "Mutant"]


class Mutant(NamedTuple):
    """
    One fault.

    Attributes:
        file (`str`): The file in `trl_padfix/`.
        old, new (`str`): The text, which occurs once in the file, and its replacement.
        fault (`str`): What is wrong then, in one line.
        tests (`tuple[str, ...]`): Files (or node ids) in `tests/` that should see it, the first to fail first.
    """

    file: str
    old: str
    new: str
    fault: str
    tests: tuple[str, ...]


# The old text stands above the new one.
FAULTS = {
    "core/layout/build.py": [
        ("position_R = real_index - begins.repeat_interleave(lengths)",
         "position_R = real_index - begins.repeat_interleave(lengths) + 1",
         "positions of a row begin with 1", "core/test_layout.py"),
        ("begins[:, 0] = True",
         "begins[0, 0] = True",
         "a packed sequence continues in the next row", "core/test_layout_of.py"),
        ("keys_R.insert(0, position_R)",
         "pass",
         "tokens behind a hole are shared with tokens at other positions", "core/test_layout.py"),
        ("cumsum(0) - 1] + 1).tolist()),",
         "cumsum(0) - 1]).tolist()),",
         "the span of a row is one column short, so a window just shorter than the row is ignored",
         "core/test_attention.py core/test_layout.py"),
        ("common_bytes(before, row) // width for",
         "-(-common_bytes(before, row) // width) for",
         "a token of which some bytes are equal counts as shared", "core/test_layout.py"),
        ("before, next_packed = begin, next_packed + length - shared",
         "next_packed = next_packed + length - shared",
         "the path of a shared prefix is that of the first row, not of the row before", "core/test_layout.py"),
        ("position_R = torch.cat([torch.arange(length) for length in lengths])",
         "position_R = torch.cat([torch.arange(length) + 1 for length in lengths])",
         "positions of a tree row begin with 1", "core/test_layout_trees.py"),
    ],
    "core/layout/layout.py": [
        ("device=self.real_index.device) * L\n",
         "device=self.real_index.device) * L - 1\n",
         "the last token of a row that ends with its last column is missed",
         "core/test_layout.py core/test_heads_reward_models.py"),
        (") == self.batch_shape[0]",
         ") >= self.batch_shape[0]",
         "a packed batch without padding is taken for whole rows, which leak", "core/test_layout_of.py"),
        ("padded = real.new_zeros(layout.padded_tokens, *real.shape[1:])",
         "padded = real.new_ones(layout.padded_tokens, *real.shape[1:])",
         "padding of unpacked values is not zero", "core/test_layout.py"),
    ],
    "core/layout/shared_prefixes.py": [
        ("forks.append(path[:-1][leaves_prefix])",
         "forks.append(path[1:][leaves_prefix])",
         "a shared prefix forks one token late", "trainers/test_prefix_schedule.py"),
        ("prefix.recompute |= any(",
         "prefix.recompute |= False and any(",
         "a prefix that reads a recomputed one is not recomputed with it", "trainers/test_prefix_schedule.py"),
        ('key_source_positions=None if keys_are_queries else index_maps["positions"],',
         'key_source_positions=None if keys_are_queries else index_maps["positions"] + 1,',
         "keys of a shared prefix stand one column later than they do", "trainers/test_prefix_schedule.py"),
    ],
    "core/call/arguments.py": [
        ("states = hidden[row, last].unsqueeze(1)",
         "states = hidden[row, last - 1].unsqueeze(1)",
         "a score is read one token early in a call that is computed padded", "core/remove/test_padded_calls.py"),
        ("index = (visual.flatten().cumsum(0) - 1).view(visual.shape)",
         "index = (visual.flatten().cumsum(0) - 1).clamp(min=1).view(visual.shape)",
         "the first token of an image gets the features of the second", "core/test_vision.py"),
    ],
    "core/patches/heads.py": [
        ("(mask[:, :-1] == 0)",
         "(mask[:, 1:] == 0)",
         "a label that only padding predicts is not found",
         "core/remove/test_padded_calls.py trainers/test_batch_rows.py"),
        ("labels[row, column + 1]",
         "labels[row, column]",
         "labels are not shifted", "core/remove/test_fused_head.py"),
    ],
    "core/call/batch_cache.py": [
        ("return torch.equal(self.copy, other)",
         "return True",
         "a batch that was written to keeps its old layout", "core/test_layout_of.py"),
    ],
    "core/call/layout_of.py": [
        ("else _content(tensor))",
         "else torch.zeros_like(_content(tensor)))",
         "rows with different images share a prefix", "core/test_vision.py"),
    ],
    "core/call/prepared_masks.py": [
        ("padding = mask[:, None, :, None] == 0 if",
         "padding = mask[:, None, :, None] >= 0 if",
         "masks in which tokens of an image see each other are taken for causal ones",
         "core/test_vision.py core/test_prepared_masks.py"),
        ("ends = (furthest.cummax(0).values == rank) & real",
         "ends = (furthest == rank) & real",
         "a block of tokens that see each other ends too early", "core/test_prepared_masks.py core/test_vision.py"),
        ("columns[-queries:]",
         "columns[:queries]",
         "a segment gets the part of the mask of its prefix", "core/test_prepared_masks.py core/test_vision.py"),
    ],
    "core/call/prefix_states.py": [
        ("else leaf.grad).to(dtype)",
         "else 2 * leaf.grad).to(dtype)",
         "the gradient of a shared prefix counts twice", "trainers/test_prefix_schedule.py"),
    ],
    "core/attention/segments.py": [
        ("mask & (distance < window)",
         "mask & (distance <= window)",
         "a window one key too wide", "core/test_attention.py"),
        ("max(0, first - window + 1)",
         "max(0, first - window + 2)",
         "the first key of a window is left out", "core/test_attention.py core/test_segments.py"),
        ("position // chunk ==",
         "(position + 1) // chunk ==",
         "a chunk ends one token early", "core/test_attention.py"),
        ("diagonal + place + QUERIES_OF_CALL]",
         "diagonal + end]",
         "the number of keys decides the order in which they are added up", "core/test_row_bits.py"),
        (".unflatten(1, (heads, -1)).sum(2)",
         ".unflatten(1, (heads, -1)).mean(2)",
         "the gradient of a key that several heads share is their mean",
         "core/test_segments.py core/test_attention.py"),
        ('mode="sum"',
         'mode="mean"',
         "the gradient of a shared key is the mean over its segments",
         "core/test_segments.py core/remove/test_numbers.py"),
    ],
    "core/attention/attention.py": [
        ("-1 if window is None else window - 1",
         "-1 if window is None else window",
         "torch's variable-length kernel gets a window one key too wide", "core/test_availability_conformance.py"),
    ],
    "core/mixers/node_tree.py": [
        ("begin = parent.number - starts[segment] + 1\n",
         "begin = parent.number - starts[segment]\n",
         "a convolution that forks sees its context one token early", "core/test_mixers.py"),
        ("if begin <= f < last}",
         "if begin < f < last}",
         "a fork behind the first token of a segment is missed", "core/test_mixers.py"),
        ("x.new_zeros(1, *x.shape[1:])])",
         "x.new_ones(1, *x.shape[1:])])",
         "a recurrence goes on beyond the end of a node", "core/test_mixers.py"),
        ("torch.zeros_like(prefix_states[:1])]",
         "prefix_states[:1]]",
         "the state of a prefix is carried into a row that begins without it", "trainers/test_prefix_schedule.py"),
    ],
    "core/mixers/row_buckets.py": [
        ("begin + lengths[s], begin + len(column)",
         "begin + lengths[s], begin + lengths[s]",
         "rows behind a padded row of a bucket are read too early", "core/test_mixers.py"),
    ],
    "core/mixers/primitives.py": [
        ("weight.shape[-1] - 1, next(keys)",
         "weight.shape[-1] - 2, next(keys)",
         "a convolution sees one token too few of its context", "core/test_mixers.py"),
    ],
    "core/patches/plan.py": [
        ("layout.batch_shape[1] - 1",
         "layout.packed_tokens - 1",
         "a dynamic rotary embedding gets the length of the packed row",
         "core/test_positions.py core/remove/test_numbers.py"),
    ],
    "core/patches/positions.py": [
        ("(column - mask.long().argmax(1, keepdim=True)).clamp(min=0)",
         "(column - mask.long().argmin(1, keepdim=True)).clamp(min=0)",
         "rows that are padded left are numbered from their first column", "trainers/test_user_code.py"),
    ],
    "core/patches/towers.py": [
        ("(first == second).all()",
         "(first == second).any()",
         "two different halves of images are computed once", "core/test_vision.py"),
    ],
    "core/parallel/local.py": [
        ("ends, tokens, right=True)",
         "ends, tokens)",
         "the first token of a process is counted to the one before", "core/test_split_rows.py"),
        ("return tokens - self.begin",
         "return tokens",
         "a process looks up its tokens by their places in the whole row", "core/test_split_rows.py"),
    ],
    "trainers/batching/bin_packing.py": [
        ("other.tokens + group.tokens <= room)",
         "other.tokens + group.tokens <= room + 1)",
         "a part has one token more than its budget", "trainers/test_bin_packing.py trainers/test_row_order.py"),
        ("_pack_subtree(rest[group.rows], room, across)",
         "_pack_subtree(rest[group.rows], budget, across)",
         "a cut group has parts over the budget", "trainers/test_bin_packing.py trainers/test_row_order.py"),
        ("np.append(self.shared, 0), ranks + 1)",
         "np.append(self.shared, 0), ranks)",
         "rows that are no neighbors share what the first of them shares with the row before",
         "trainers/test_bin_packing.py"),
        ("host_mask.bool() | host_scored.bool()",
         "host_mask.bool()",
         "a column that is scored and masked is cut off", "trainers/test_row_splits.py"),
    ],
    "trainers/batching/chunk_metrics.py": [
        ("[values[name][-1] * count, count]",
         "[values[name][-1], 1.0]",
         "a metric is a mean over chunks, not over rows", "trainers/test_token_budget.py"),
    ],
    "trainers/batching/merged_output.py": [
        ("torch.cat(list(rows)).argsort()",
         "torch.cat(list(rows))",
         "outputs of sub-batches come in the inverse order", "trainers/test_part_runner.py"),
        ("else labels[:, 1:]",
         "else labels",
         "a label of the first column counts in a mean over labels", "trainers/test_part_runner.py"),
    ],
    "trainers/batching/token_budget.py": [
        ("losses.append(compute() * weight)",
         "losses.append(compute())",
         "the loss of a chunk is not weighted", "trainers/test_token_budget.py"),
    ],
    "trainers/batching/balancing_loss.py": [
        ("else torch.cat([m for m in masks if m is not None])",
         "else None",
         "the load-balancing loss of sub-batches counts padding", "trainers/test_prefix_schedule.py"),
    ],
    "trainers/data/collators.py": [
        ('batch["labels"][rows, first], batch["labels"][rows, 0]',
         'batch["labels"][rows, first], batch["labels"][rows, first]',
         "the first token of a left-padded row keeps its label", "trainers/test_collators.py"),
        ('"labels": -100}',
         '"labels": 0}',
         "the pad token of an empty row has a label", "trainers/test_collators.py"),
    ],
    "trainers/checks/user_code.py": [
        ('getattr(of_user, "is_observed", False):',
         "True:",
         "a loss that is set on a class is not compared", "trainers/test_step_parity.py"),
    ],
    "trainers/methods/kto.py": [
        ('return len(chunk["input_ids"]) / len(batch["input_ids"])',
         "return 1 / 2",
         "chunks of KTO have equal weights, whatever their rows", "trainers/test_token_budget.py"),
        ("tokens[rows].sum()",
         "rows.sum()",
         "a mean over completion tokens has the weight of the rows", "trainers/test_token_budget.py"),
    ],
    "trainers/methods/online.py": [
        ('else mask * batch["tool_mask"]).sum()',
         "else mask).sum()",
         "answers of tools count as trained tokens", "trainers/test_methods.py"),
        ("entries[i] for i in order.tolist()",
         "entries[i] for i in range(len(order))",
         "lists of a batch stay where they were when its rows are grouped", "trainers/test_methods.py"),
    ],
    "trainers/parts/metrics_parity.py": [
        ("without_packing(handles, at_padding=at_padding)",
         "without_packing(handles)",
         "metrics are compared without zeros at padding", "trainers/test_step_parity.py"),
    ],
    "trainers/parts/padding_side.py": [
        ('self.trainer.data_collator.padding_side == "left"',
         'self.trainer.data_collator.padding_side == "right"',
         "rows that a trainer pads left are numbered from their padding in calls that are computed padded",
         "trainers/test_user_code.py"),
    ],
    "trainers/parts/context_parallel.py": [
        ("(processes, -1))[::size]",
         "(processes, -1))[:: size - 1]",
         "rows that several processes share are gathered several times", "trainers/test_context_parallel.py"),
    ],
}  # fmt: skip
"""For each file the other fields of its mutants, with their tests in one text."""

MUTANTS = [Mutant(file, *texts, tuple(tests.split())) for file, faults in FAULTS.items() for *texts, tests in faults]
