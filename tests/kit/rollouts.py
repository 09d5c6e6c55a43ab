"""Samples as a rollout worker of TRL's asynchronous GRPO hands them over, and their loss as TRL computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


VOCABULARY = 40


def build_samples(groups: int = 2, generations: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """
    Samples in groups: a common system prompt, a prompt for each group, and completions.

    Every second completion goes on behind the answer of the one before, as a second turn with a tool's answer.
    """
    draw = np.random.default_rng(seed)
    system, samples = draw.integers(2, VOCABULARY - 1, 11).tolist(), []
    for group in range(groups):
        head = system + draw.integers(2, VOCABULARY - 1, draw.integers(20, 30)).tolist()
        for i in range(generations):
            ids, mask = list(head), [0] * len(head)
            if i % 2:
                tool = draw.integers(2, VOCABULARY - 1, 4).tolist()
                ids = [*samples[-1]["input_ids"].tolist(), *tool]
                mask = [*samples[-1]["completion_mask"].tolist(), *[0] * 4]
            answer = draw.integers(2, VOCABULARY - 1, draw.integers(3, 14)).tolist()
            ids, mask = ids + answer, mask + [1] * len(answer)
            old = (-4 - draw.random(len(ids))) * np.array(mask)
            samples.append(
                {
                    "input_ids": np.array(ids),
                    "completion_mask": np.array(mask),
                    "old_log_probs": old.astype(np.float32),
                    "advantage": float(draw.normal()),
                    "group_id": group,
                    "metrics": {"reward": 0.0},
                }
            )
    return samples


def distinct_tokens(samples: list[dict[str, Any]]) -> int:
    """Distinct prefixes of the samples, counted without a trie."""
    rows = [sample["input_ids"].tolist() for sample in samples]
    return len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})


def tree_row(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What TRL's collator makes of samples for one process, without the leading dimension."""
    from trl.experimental.async_grpo.packing import TreeRow

    row = TreeRow()
    for sample in samples:
        row.add(sample)
    return row.pack()


def tree_call(row: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The arguments of TRL's forward on such a row, without labels."""
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), row["tree_max_seqlens"].tolist(), strict=True))
    ids = {name: row[name][None] for name in ("input_ids", "position_ids")}
    return ids | {name: row[name] for name in names} | longest


def loss_of_terms(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """The clipped loss of TRL, a sum over trained tokens."""
    ratio = torch.exp(log_probs - old)
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


def tree_loss(model: Any, samples: list[dict[str, Any]], fused: bool = True, **changes: Any) -> torch.Tensor:
    """The loss of a tree row; `changes` replace arguments of the call. With `fused` by TRL's fused head."""
    row = tree_row(samples)
    call = tree_call(row) | changes
    index, labels = row["token_index"], row["shift_labels"]
    if fused:
        log_probs = model(**call, shift_labels=labels[None], fused_lm_head=True).log_probs.flatten()[index]
    else:
        log_probs = model(**call).logits[0, index].log_softmax(-1).gather(1, labels[index, None])[:, 0]
    return loss_of_terms(log_probs, row["old_log_probs"], row["advantages"])


def loss_of_rows(model: Any, samples: list[dict[str, Any]]) -> torch.Tensor:
    """The same loss with a forward of its own for each sample."""
    return sum((loss_of_sample(model, sample) for sample in samples), torch.zeros(()))


def loss_of_sample(model: Any, sample: dict[str, Any]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor(sample["input_ids"])[None], use_cache=False).logits[0]
    ids, mask, old = (torch.tensor(sample[name]) for name in ("input_ids", "completion_mask", "old_log_probs"))
    log_probs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    trained = mask[1:] == 1
    advantages = torch.full_like(old[1:], sample["advantage"])
    return loss_of_terms(log_probs[trained], old[1:][trained], advantages[trained])


def sampled_by(model: Any, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples with log-probabilities near those of the model, as if an older policy had drawn them."""
    generator = torch.Generator().manual_seed(1)
    for sample in samples:
        ids = torch.tensor(sample["input_ids"])
        with torch.no_grad():
            log_probs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        log_probs = torch.nn.functional.pad(log_probs.gather(1, ids[1:, None])[:, 0], (1, 0))
        noise = 0.15 * torch.randn(len(ids), generator=generator)
        sample["old_log_probs"] = ((log_probs + noise) * torch.tensor(sample["completion_mask"])).float().numpy()
    return samples
