"""A training with what the package needs and no more; arguments: where it is installed, an output folder, pairs."""

import sys
from pathlib import Path

from datasets import load_dataset

import trl_padfix
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


if __name__ == "__main__":
    folder = Path(trl_padfix.__file__).parent
    assert str(folder).startswith(sys.argv[1]), folder
    data = load_dataset("json", data_files=sys.argv[3], split="train[:8]")
    tokenizer = train_tokenizer((m["content"] for row in data for m in row["prompt"] + row["chosen"]), 512)
    args = trl_padfix.DPOConfig(
        output_dir=sys.argv[2],
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        padding_free=True,
        prefix_sharing=True,
        logging_steps=1,
        max_length=128,
    )
    models = [build_qwen2(tokenizer, **SHAPES["tiny"] | {"vocab_size": len(tokenizer)}) for _ in range(2)]
    given = dict(args=args, train_dataset=data, processing_class=tokenizer)
    trainer = trl_padfix.DPOTrainer(models[0], ref_model=models[1], **given)
    trainer.train()
    assert trainer.state.log_history[0]["padfix/pad_fraction"] > 0
    print("TRAINED")
