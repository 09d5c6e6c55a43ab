"""
Trees of rollouts through layers with a state: the forks of this package against the hooks of `tree-recurrence`.

    pip install --no-deps tree-recurrence==0.1.1
    python benchmarks/tree_race.py
    python benchmarks/tree_race.py mamba2 --prompt 1024 --answer 128 --repeat 9

Both compute one tree of TRL's asynchronous GRPO, with the same model, forward and backward, in turns; so does the
plain model on the samples as a padded batch. Losses and gradients must agree with the padded ones, or the command
fails. Attention is not raced: `tree-recurrence` leaves it to a kernel for GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from trl.experimental.async_grpo.packing import TreeRow

from trl_padfix import remove_padding


SIZES = dict(vocab_size=96, hidden_size=128, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
CONFIGS: dict[str, Callable[[], Any]] = {
    "gated delta net": lambda: transformers.Qwen3_5TextConfig(
        **SIZES,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        layer_types=["linear_attention"] * 2,
    ),
    "mamba2": lambda: transformers.Mamba2Config(**SIZES, num_heads=8, head_dim=32, state_size=16, n_groups=1),
}
TREE = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


def draw_samples(prompt: int, answer: int, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Answers of about `answer` tokens to one prompt, as a rollout worker hands them over."""
    draw = np.random.default_rng(seed)
    head, samples = draw.integers(3, 96, prompt), []
    for _ in range(count):
        ids = np.concatenate([head, draw.integers(3, 96, draw.integers(answer * 3 // 4, answer * 5 // 4))])
        mask = np.arange(len(ids)) >= prompt
        samples.append(
            {"input_ids": ids, "completion_mask": mask.astype(np.int64), "advantage": 1.0, "group_id": 0}
            | {"old_log_probs": np.zeros(len(ids), dtype=np.float32)}
        )
    return samples


class Race:
    """One tree, and the three ways to compute it; each returns the loss, with gradients in the model."""

    def __init__(self, family: str, samples: list[dict[str, Any]]):
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).train()
        with torch.no_grad():  # weights as large as a trained model's, so that tokens hear of those before them
            for weight in (p for p in self.model.parameters() if p.dim() > 1):
                torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 if weight.dim() == 2 else 0.5)
        row = TreeRow()
        for sample in samples:
            row.add(sample)
        self.row = row.pack()
        self.tokens, self.raw = len(self.row["input_ids"]), sum(len(sample["input_ids"]) for sample in samples)
        rows = [torch.tensor(sample["input_ids"]) for sample in samples]
        self.padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        width = self.padded.size(1)
        # The position before each trained token, in the order of the terms of TRL's tree.
        self.before = torch.cat(
            [i * width + torch.tensor(s["completion_mask"]).nonzero()[:, 0] - 1 for i, s in enumerate(samples)]
        )
        self.weights = torch.randn(len(self.before), 96, generator=torch.Generator().manual_seed(0))
        self.computed = 0

    def _loss(self, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        loss = (logits[index].log_softmax(-1) * self.weights).sum() / len(index)
        self.model.zero_grad()
        loss.backward()
        return loss.detach()

    def rows(self) -> torch.Tensor:
        """Right-padded, so that no token is behind padding: a layer with a state needs no mask."""
        return self._loss(self.model(input_ids=self.padded, use_cache=False).logits.flatten(0, 1), self.before)

    def _tree(self) -> torch.Tensor:
        tree = {name: self.row[name].clone() for name in TREE}  # both keep what they made of a tree, by its tensors
        tree |= dict(
            zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), self.row["tree_max_seqlens"].tolist(), strict=True)
        )
        ids = {name: self.row[name][None] for name in ("input_ids", "position_ids")}
        return self._loss(self.model(**ids, **tree, use_cache=False).logits[0], self.row["token_index"])

    def theirs(self) -> torch.Tensor:
        import tree_recurrence

        support = tree_recurrence.install(self.model)
        if support.mode != "tree":
            raise RuntimeError(f"tree-recurrence does not serve this model as a tree: {support.reason}")
        try:
            return self._tree()
        finally:  # our package would take its hooks for kernels of the model
            tree_recurrence.uninstall(self.model)

    def ours(self) -> torch.Tensor:
        with remove_padding(self.model, prefix_sharing=True) as handle:
            loss = self._tree()
        self.computed = handle.stats.packed_tokens
        return loss

    def gradients(self) -> torch.Tensor:
        # A layer that the other way does not use has none, or zeros.
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def check(self) -> dict[str, tuple[float, float]]:
        """Relative differences of loss and gradients from those of the padded rows."""
        expected, by_rows = self.rows(), self.gradients()
        found = {}
        for name in ("theirs", "ours"):
            loss = getattr(self, name)()
            off = ((self.gradients() - by_rows).norm() / by_rows.norm()).item()
            found[name] = (abs(loss - expected) / abs(expected)).item(), off
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(CONFIGS), help=f"of {', '.join(CONFIGS)}")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer, about")
    parser.add_argument("--answers", type=int, default=8, help="answers to the prompt")
    parser.add_argument("--repeat", type=int, default=9, help="runs of each, in turns")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for family in given.families:
        race = Race(family, draw_samples(given.prompt, given.answer, given.answers))
        off = race.check()
        assert max(max(pair) for pair in off.values()) < 1e-4, off
        times: dict[str, list[float]] = {"rows": [], "theirs": [], "ours": []}
        for _ in range(given.repeat):
            for name, seconds in times.items():
                begin = time.perf_counter()
                getattr(race, name)()
                seconds.append(time.perf_counter() - begin)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        ratios = [theirs / ours for theirs, ours in zip(times["theirs"], times["ours"], strict=True)]
        print(
            f"{family}, {race.raw} tokens in rows, {race.tokens} in TRL's tree, {race.computed} distinct: rows "
            f"{medians['rows'] * 1e3:.0f} ms, tree-recurrence {medians['theirs'] * 1e3:.0f} ms, trl_padfix "
            f"{medians['ours'] * 1e3:.0f} ms; {statistics.median(ratios):.1f}x as fast as tree-recurrence "
            f"({min(ratios):.1f} to {max(ratios):.1f}); loss and gradients off by "
            + ", ".join(f"{name} {loss:.0e} and {gradient:.0e}" for name, (loss, gradient) in off.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
