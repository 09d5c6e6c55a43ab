"""
Ways of activation checkpointing in a DPO step: what is kept on the device for backward, and what is computed again.

    python docs/bench/activations.py

Kept bytes are those that graphs save when backward begins (hooks, as in `once.py`) and the outputs that selective
checkpointing keeps. Offloaded ones do not count: a CPU stands for the device here, and its copies for the host.
Operators are those of the whole step, reference and backward included.
"""

import random
import tempfile
from collections import Counter
from functools import partial
from typing import Any

import torch
import transformers.modeling_utils
from datasets import Dataset
from once import Kept
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trl_padfix import DPOConfig, DPOTrainer, build_tiny


WAYS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "every layer": {},
    "every_n_layers: 2": {"every_n_layers": 2},
    "selective": {"selective": True},
    "offload": {"offload": True},
    "selective, offload": {"selective": True, "offload": True},
}


class Operators(TorchDispatchMode):
    """Counts the operators that are computed, and remembers the outputs of attention."""

    def __init__(self):
        super().__init__()
        self.counts, self.attended = Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        name = str(func)
        self.counts["products"] += name.startswith(("aten.mm", "aten.addmm", "aten.bmm"))
        if "attention" in name and "backward" not in name:
            self.counts["attentions"] += 1
            for x in output:
                if isinstance(x, torch.Tensor):
                    storage = x.untyped_storage()
                    self.attended[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return output

    def kept_beside(self, meter: Kept) -> int:
        """Bytes of outputs of attention that something holds, but no graph."""
        return sum(n for at, (ref, n) in self.attended.items() if not ref.expired() and at not in meter.counts)


def build_pairs(count: int = 8) -> Dataset:
    draw = random.Random(0)
    words = [f"{chr(97 + i % 26)}{i}" for i in range(300)]
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 60))) for _ in range(3 * count)]
    return Dataset.from_list(
        [{"prompt": texts[i], "chosen": texts[i + count], "rejected": texts[i - count]} for i in range(count)]
    )


def main() -> None:
    save = transformers.modeling_utils.save_on_cpu
    transformers.modeling_utils.save_on_cpu = lambda **how: save(pin_memory=False)
    torch.accelerator.is_available = lambda: True
    torch.manual_seed(0)
    rows = build_pairs()
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny("tiny", rows, f"{folder}/model")
        for way, kwargs in WAYS.items():
            config = DPOConfig(
                f"{folder}/run", padding_free=True, prefix_sharing=True, parity_check=False, max_steps=1,
                per_device_train_batch_size=8, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
                save_strategy="no", logging_steps=1, activation_checkpointing=kwargs is not None,
                activation_checkpointing_kwargs=kwargs,
            )  # fmt: skip
            trainer = DPOTrainer(model, args=config, train_dataset=rows)
            meter, operators, kept = Kept(trainer.model), Operators(), []

            def backward(loss, run, meter=meter, operators=operators, kept=kept, **how):
                kept.append(meter.now + operators.kept_beside(meter))
                run(loss, **how)

            trainer.accelerator.backward = partial(backward, run=trainer.accelerator.backward)
            with meter.metered(), operators:
                trainer.train()
            norm = trainer.state.log_history[0]["grad_norm"]
            print(
                f"{way:20} keeps {kept[0] / 2**20:6.2f} MiB, computes {operators.counts['attentions']:4} attentions "
                f"and {operators.counts['products']:4} products; gradient norm {norm:.6f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
