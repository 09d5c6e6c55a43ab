"""Token ids of batches with images that the model has no embedding for: an error before a forward, with the row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from kit.vision_runs import build_captions, build_pairs, build_processor, build_vlm, make_vision_trainer
from transformers import Gemma3Config, Qwen2Config

import trl_padfix
from trl_padfix import DataCollatorForVisionLanguageModeling
from trl_padfix.trainers.data.row_checks import image_token_ids


DATA = {"DPO": build_pairs, "SFT": build_captions, "KTO": build_captions}
MODES = {"padded": {}, "padding-free, left": {"padding_free": True, "padding_side": "left"}}


def with_unknown_word(kind: str, row: int) -> Dataset:
    """Four examples, one of which has a word that is in the tokenizer and not in the model."""
    data = DATA[kind](4)
    last = "completion" if "completion" in data.column_names else "rejected"

    def change(example: dict[str, Any], i: int) -> dict[str, Any]:
        text = example[last][0]["content"] + (" x19 w3" if i == row else "")
        return {last: [{"role": "assistant", "content": text}]} | ({"label": i % 2 == 0} if kind == "KTO" else {})

    return data.map(change, with_indices=True)


def build_trainer(kind: str, data: Any, folder: Any, **config: Any) -> Any:
    processor = build_processor("llava")
    model = build_vlm("llava", processor)
    processor.tokenizer.add_tokens([f"x{i}" for i in range(20)])
    assert processor.tokenizer.convert_tokens_to_ids("x19") >= model.get_input_embeddings().num_embeddings
    given = {"max_steps": 2, "per_device_train_batch_size": 4, "processing_class": processor} | config
    return make_vision_trainer(trl_padfix, kind, "llava", folder, model=model, train_dataset=data, **given)


@pytest.mark.parametrize(
    ("kind", "streamed", "mode"),
    [("DPO", True, "padding-free, left"), ("SFT", False, "padding-free, left"), ("KTO", True, "padding-free, left")],
)
def test_an_unknown_id_is_an_error_with_its_row(kind, streamed, mode, tmp_path):
    data = with_unknown_word(kind, row=2)
    trainer = build_trainer(kind, data.to_iterable_dataset() if streamed else data, tmp_path, **MODES[mode])
    entered: list[Any] = []
    trainer.model.register_forward_pre_hook(lambda *given: entered.append(given))
    row = "2" if streamed else r"\d"  # a dataset is shuffled
    with pytest.raises(
        ValueError, match=rf"Row {row} of the batch .* the token id \d+, .*has embeddings for 0 to \d+"
    ):
        trainer.train()
    assert not entered
    assert trainer.state.global_step == 0


def test_known_ids_train_from_a_stream(tmp_path):
    trainer = build_trainer("SFT", DATA["SFT"](8).to_iterable_dataset(), tmp_path, padding_free=True)
    trainer.train()
    assert trainer.state.global_step == 2


def test_what_stands_for_an_image_may_lie_beyond_the_vocabulary():
    collator = DataCollatorForVisionLanguageModeling(
        build_processor("llava"), vocabulary=50, stand_ins=frozenset({60})
    )
    collator.check_ids({"input_ids": torch.tensor([[3, 60, 49], [4, 0, 0]])}, 1)
    for value in (-1, 50, 64):
        batch = {"input_ids": torch.tensor([[3, 60, 49], [4, 5, 6], [4, 5, value]])}
        with pytest.raises(ValueError, match=rf"Row 0 of the batch .*\) holds the token id {value}, and"):
            collator.check_ids(batch, 2)


def test_the_ids_of_images_are_read_from_the_configuration():
    config = Gemma3Config(image_token_index=262144, boi_token_index=255999, eoi_token_index=256000)
    assert image_token_ids(config) == {262144, 255999, 256000}
    assert image_token_ids(Qwen2Config(bos_token_id=1, eos_token_id=2, pad_token_id=0)) == frozenset()
