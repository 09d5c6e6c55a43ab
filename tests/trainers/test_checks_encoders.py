"""Models whose tokens see later ones are refused with the reason, before TRL's `__init__`, which fails with some."""

import pytest
from kit.methods import make_trainer
from kit.trainer_runs import build_model, build_tokenizer, make_plain_trainer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen2ForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForSequenceClassification,
    Trainer,
)

import trl_padfix
from trl_padfix import PaddingRemovalCallback, PaddingRemovalError, padding_free_trainer


SIZE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "pad_token_id": 39}
SIZE |= {"num_attention_heads": 2, "num_labels": 1}
T5 = {"vocab_size": 40, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "num_labels": 1}
BOTH = "attends in both directions"
MODELS = {
    "bert": (lambda: BertForSequenceClassification(BertConfig(**SIZE)), BOTH),
    "modernbert": (lambda: ModernBertForMaskedLM(ModernBertConfig(**SIZE)), BOTH),
    "t5": (lambda: T5ForSequenceClassification(T5Config(**T5)), "encoder-decoder"),
    "the encoder of t5": (lambda: T5EncoderModel(T5Config(**T5)), f"{BOTH}|encoder-decoder"),
}
KINDS, LOADS = ["SFT", "DPO", "Reward", "KTO"], [True, False]


def saved(model, folder):
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("name", "kind", "loads"), [*zip(MODELS, KINDS * 2, LOADS * 3, strict=False)])
def test_an_encoder_is_refused_with_the_reason(name, kind, loads, tmp_path):
    build, why = MODELS[name]
    model = saved(build(), tmp_path / "model") if loads else build()
    with pytest.raises(
        PaddingRemovalError, match=rf"^Padding cannot be removed from (Bert|Rob|Mod|T5).*({why}).*padding_free"
    ):
        make_trainer(trl_padfix, kind, tmp_path, model=model, padding_free=True)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_so_it_is_by_any_trainer_and_by_the_callback(name, tmp_path):
    build, why = MODELS[name]
    rows = [{"input_ids": [3, 4, 5]}]
    with pytest.raises(PaddingRemovalError, match=why):
        make_plain_trainer(tmp_path, padding_free_trainer(Trainer), model=build(), train_dataset=rows)
    trainer = make_plain_trainer(
        tmp_path, Trainer, model=build(), train_dataset=rows, callbacks=[PaddingRemovalCallback()]
    )
    with pytest.raises(PaddingRemovalError, match=why):
        trainer.train()


@pytest.mark.parametrize("loads", [False, True], ids=["object", "path"])
def test_padded_an_encoder_is_trained_as_in_trl(loads, tmp_path):
    model = MODELS["bert"][0]()
    model = saved(model, tmp_path / "model") if loads else model
    trainer = make_trainer(trl_padfix, "Reward", tmp_path, model=model, max_steps=1)
    assert trainer.train().global_step == 1


def test_a_decoder_is_not_built_twice(tmp_path, monkeypatch):
    built, model = [], saved(build_model(), tmp_path / "model")
    init = Qwen2ForCausalLM.__init__
    monkeypatch.setattr(Qwen2ForCausalLM, "__init__", lambda self, *args: built.append(init(self, *args)))
    trainer = make_trainer(trl_padfix, "SFT", tmp_path, model=model, padding_free=True)
    assert trainer.padding.is_removed
    assert len(built) == 1
