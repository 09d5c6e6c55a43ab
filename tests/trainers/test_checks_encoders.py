"""Models whose tokens see later ones are refused with the reason, before TRL's `__init__`, which fails with some."""

import pytest
from kit.methods import make_trainer
from kit.trainer_runs import build_model, build_tokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Qwen2ForCausalLM,
    T5Config,
    T5ForSequenceClassification,
)

import trl_padfix
from trl_padfix import PaddingRemovalError


SIZE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "pad_token_id": 39}
SIZE |= {"num_attention_heads": 2, "num_labels": 1}
T5 = {"vocab_size": 40, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "num_labels": 1}
MODELS = {
    "bert": (lambda: BertForSequenceClassification(BertConfig(**SIZE)), "attends in both directions"),
    "t5": (lambda: T5ForSequenceClassification(T5Config(**T5)), "encoder-decoder"),
}


def saved(model, folder):
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


CELLS = [("bert", "SFT", True), ("t5", "DPO", False), ("bert", "Reward", False), ("t5", "KTO", True)]


@pytest.mark.parametrize(("name", "kind", "loads"), CELLS)
def test_an_encoder_is_refused_with_the_reason(name, kind, loads, tmp_path):
    build, why = MODELS[name]
    model = saved(build(), tmp_path / "model") if loads else build()
    with pytest.raises(
        PaddingRemovalError, match=rf"^Padding cannot be removed from (Bert|T5).*({why}).*padding_free"
    ):
        make_trainer(trl_padfix, kind, tmp_path, model=model, padding_free=True)


def test_a_decoder_is_not_built_twice(tmp_path, monkeypatch):
    built, model = [], saved(build_model(), tmp_path / "model")
    init = Qwen2ForCausalLM.__init__
    monkeypatch.setattr(Qwen2ForCausalLM, "__init__", lambda self, *args: built.append(init(self, *args)))
    trainer = make_trainer(trl_padfix, "SFT", tmp_path, model=model, padding_free=True)
    assert trainer.padding.is_removed
    assert len(built) == 1
