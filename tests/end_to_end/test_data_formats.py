"""The page of data formats: each row on it trains with the trainer of its heading, padding-free."""

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

import trl_padfix


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/data_formats.md").read_text()
ROWS = [
    (method, json.loads(row))
    for method, body in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    for row in re.findall(r"```json\n(.*?)```", body, re.DOTALL)
]


def trained(method: str, row: dict, model: str, folder: Path):
    """The trainer after a step on a row and one that is longer."""
    other = json.loads(json.dumps(row).replace("Where is Rome?", "And where in the world is Paris?"))
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "bf16": False}
    arguments = {"train_dataset": Dataset.from_list([row, other] * 4)}
    if method == "GRPO":
        settings |= {"num_generations": 2, "max_completion_length": 4}
        arguments["reward_funcs"] = lambda completions, solution, **_: [float(len(text)) for text in solution]
    config = getattr(trl_padfix, f"{method}Config")(str(folder), padding_free=True, disable_tqdm=True, **settings)
    trainer = getattr(trl_padfix, f"{method}Trainer")(
        model, args=config, processing_class=AutoTokenizer.from_pretrained(model), **arguments
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("method", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_a_row_of_the_page_trains(method, row, tiny_model, tmp_path):
    trainer = trained(method, row, tiny_model, tmp_path)
    assert trainer.state.global_step == 1
    assert trainer.padding.stats.real_tokens > 0


def test_the_page_has_every_method_and_a_row_without_its_columns_is_refused(tiny_model, tmp_path):
    assert {method for method, _ in ROWS} == {"SFT", "DPO", "Reward", "KTO", "GRPO"}
    with pytest.raises((KeyError, ValueError)):
        trained("DPO", {"prompt": "Where is Rome?", "chosen": "In Italy."}, tiny_model, tmp_path)
