"""What the progress bar says of a training's tokens."""

import pytest
import torch
from datasets import Dataset
from kit.methods import make_trainer
from kit.trainer_runs import MODES
from transformers import ProgressCallback

import trl_padfix


TEXTS = ["w3 w4 w5 w6 w7 w8 w9 w10", "w3 w4", "w3 w4 w5 w6 w7 w8 w9 w11", "w3 w4 w12"]


@pytest.mark.parametrize("mode", MODES)
def test_the_bar_shows_tokens_a_second_and_what_is_not_computed(mode, tmp_path, monkeypatch):
    said = []

    def set_up(self, args, state, control, **kwargs):
        begin(self, args, state, control, **kwargs)
        monkeypatch.setattr(self.training_bar, "set_postfix_str", said.append)

    begin = ProgressCallback.on_train_begin
    monkeypatch.setattr(ProgressCallback, "on_train_begin", set_up)
    given = {"max_steps": 2, "disable_tqdm": False, "per_device_train_batch_size": 4}
    data = Dataset.from_dict({"text": TEXTS})
    trainer = make_trainer(trl_padfix, "SFT", tmp_path, train_dataset=data, **given | MODES[mode])
    trainer.train()
    lengths = torch.tensor([len(trainer.processing_class(text)["input_ids"]) + 1 for text in TEXTS])  # and the end
    computed = {"padded": None, "padding-free": int(lengths.sum()), "prefix sharing": 9 + 1 + 2 + 2}[mode]
    assert len(said) == 2
    for text in said:
        number, _, rest = text.partition(" tokens/s")
        assert int(number.replace(",", "")) > 0
        if computed is None:
            assert rest == ""
        else:
            assert rest == f", {1 - computed / (4 * int(lengths.max())):.0%} of the batch not computed"
