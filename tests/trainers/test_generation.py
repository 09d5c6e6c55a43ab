"""Evaluation that generates: what each prompt alone would be continued with, and nothing else is changed by it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from kit import generation_run, vision_runs
from kit.generation_run import build_pairs
from kit.methods import make_trainer
from kit.processes import logged
from kit.trainer_runs import MODES, build_model, build_tokenizer, rows_for

import trl_padfix
from trl_padfix.core.handle import PaddingRemoval


NEW = 6
GENERATING = {"predict_with_generate": True, "generation_max_new_tokens": NEW}


def build_rows(name: str, count: int = 7, seed: int = 0) -> Dataset:
    return rows_for(name.upper(), build_pairs(count, seed))


def make(name, path, **given):
    """A trainer on ragged rows that evaluates with generation in batches of three."""
    given = {"train_dataset": build_rows(name), "eval_dataset": build_rows(name), "max_steps": 2} | given
    given = {"processing_class": build_tokenizer(), "model": build_model(), "per_device_eval_batch_size": 3} | given
    if name == "dpo" and "peft_config" not in given:
        given = {"ref_model": build_model(seed=1, vocab_size=given["model"].config.vocab_size)} | given
    return make_trainer(trl_padfix, name.upper(), path, **GENERATING | given)


def written(path, name="step_00000") -> list[dict[str, str]]:
    return [json.loads(line) for line in (Path(path) / "generations" / f"{name}.jsonl").read_text().splitlines()]


def alone(trainer, prompts: list[str], **settings) -> list[str]:
    """What the model of a trainer continues each prompt with by itself, padding removal off."""
    tokenizer, model = build_tokenizer(), trainer.model.eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        handle = PaddingRemoval.of(model)
        with handle.disabled() if handle is not None else torch.no_grad():
            new = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **settings
            )[0, ids.shape[1] :]
        found.append(tokenizer.decode(new, skip_special_tokens=True))
    return found


# Predictions


@pytest.mark.parametrize(
    ("name", "mode", "side"), [("dpo", MODES["prefix sharing"], "left"), ("sft", MODES["padding-free"], "right")]
)
def test_prompts_are_continued_as_alone(name, mode, side, tmp_path):
    trainer = make(name, tmp_path, padding_side=side, **mode)
    trainer.evaluate()
    rows, found = trainer.eval_dataset, written(tmp_path)
    assert [row["prompt"] for row in found] == rows["prompt"]
    assert [row["prediction"] for row in found] == alone(trainer, rows["prompt"])
    answers = rows["chosen" if name == "dpo" else "completion"]
    assert [row["reference"] for row in found] == [answer.removesuffix("<eos>").strip() for answer in answers]
    assert len({row["prediction"] for row in found}) > 4
    for handle in trainer.padding.handles:
        assert 0 < handle.stats.packed_tokens < handle.stats.padded_tokens


def build_chat_tokenizer():
    tokenizer = vision_runs.build_tokenizer()
    tokenizer.chat_template = vision_runs.TEMPLATE
    return tokenizer


def conversation(*contents):
    roles = ["system"] if len(contents) % 2 else []
    roles += ["user", "assistant"] * (len(contents) // 2)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


@pytest.mark.parametrize("name", ["dpo", "sft", "messages"])
def test_the_prompt_of_a_conversation_is_what_precedes_its_last_answer(name, tmp_path):
    conversations = [
        conversation("w1 w2", "w3"),
        conversation("w9", "w1", "w2 w3 w4", "w5", "w6 w7"),
        conversation("w1", "w2", "w3", "w4 w5 w6"),
    ]
    rows = Dataset.from_list([{"prompt": c[:-1], "completion": c[-1:], "chosen": c[-1:]} for c in conversations])
    if name == "dpo":
        rows = rows.remove_columns("completion").add_column("rejected", [conversation("w0", "w8")[1:]] * 3)
    elif name == "sft":
        rows = rows.remove_columns("chosen")
    else:
        rows = Dataset.from_list([{"messages": c} for c in conversations])
    model = build_model(vocab_size=80)
    make(
        name.replace("messages", "sft"), tmp_path, model=model, processing_class=build_chat_tokenizer(),
        train_dataset=rows, eval_dataset=rows,
    ).evaluate()  # fmt: skip
    found = written(tmp_path)
    assert [row["prompt"] for row in found] == [
        "user w1 w2 <eos> assistant ",
        "system w9 <eos> user w1 <eos> assistant w2 w3 w4 <eos> user w5 <eos> assistant ",
        "user w1 <eos> assistant w2 <eos> user w3 <eos> assistant ",
    ]
    assert [row["reference"] for row in found] == ["w3", "w6 w7", "w4 w5 w6"]


def build_speaker(name, processor):
    """A vision-language model that continues with words."""
    model, tokenizer = vision_runs.build_vlm(name, processor), processor.tokenizer
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    spoken = {*tokenizer.convert_tokens_to_ids(vision_runs.WORDS), tokenizer.eos_token_id}
    size = model.config.get_text_config().vocab_size
    model.generation_config.suppress_tokens = [i for i in range(size) if i not in spoken]
    return model


@pytest.mark.parametrize(("name", "data", "side"), [("llava", "dpo", "left"), ("qwen2_5_vl", "sft", "right")])
def test_prompts_with_images_are_continued_as_alone(name, data, side, tmp_path):
    processor = vision_runs.build_processor(name, with_videos=False)
    processor.tokenizer.padding_side = side
    model = build_speaker(name, processor)
    texts, counts = ["w1 w2", "w3", "w4 w5 w6 w7 w8", "w9 w1"], [1, 2, 1, 1]
    images = [
        [vision_runs.build_image(random.Random(10 * i + j), 16, 16 + 8 * (j % 2)) for j in range(count)]
        for i, count in enumerate(counts)
    ]
    asked = [[{"role": "user", "content": text}] for text in texts]
    answer, other = ([{"role": "assistant", "content": f"w{i} w{i}"}] for i in (2, 3))
    answers = {"chosen": answer, "rejected": other} if data == "dpo" else {"completion": answer}
    rows = Dataset.from_list([{"images": i, "prompt": q, **answers} for i, q in zip(images, asked, strict=True)])
    given = {"model": model, "processing_class": processor, "train_dataset": rows, "eval_dataset": rows}
    given |= {"ref_model": build_speaker(name, processor)} if data == "dpo" else {}
    given |= {"per_device_eval_batch_size": 3, "max_length": None}
    make_trainer(trl_padfix, data.upper(), tmp_path, **GENERATING | given).evaluate()

    expected = []
    for i, q in zip(images, asked, strict=True):
        prompt = trl.data_utils.prepare_multimodal_messages(q, images=i)
        text = processor.apply_chat_template(prompt, add_generation_prompt=True)
        inputs = processor(text=[text], images=[i], return_tensors="pt", add_special_tokens=False)
        tokens = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        expected.append(processor.tokenizer.decode(tokens, skip_special_tokens=True))
    assert [row["prediction"] for row in written(tmp_path)] == expected
    assert {row["reference"] for row in written(tmp_path)} == {"w2 w2"}
    assert len(set(expected)) > 2
    assert processor.tokenizer.padding_side == side


# What becomes of them


def test_metrics_are_computed_from_padded_tokens_and_no_logits_are_kept(tmp_path):
    received, kept = [], []

    def compute_metrics(predicted):
        received.append(predicted)
        return {"rows": np.float64(len(predicted.predictions)), "eval_named": 1}

    trainer = make("dpo", tmp_path, compute_metrics=compute_metrics, include_for_metrics=["inputs"])
    compute_loss = trainer.compute_loss

    def watched(*args, return_outputs=False, **kwargs):
        kept.append(return_outputs)
        return compute_loss(*args, return_outputs=return_outputs, **kwargs)

    trainer.compute_loss = watched
    metrics = trainer.evaluate()
    assert kept == [False] * 3
    assert (metrics["eval_rows"], metrics["eval_named"]) == (7.0, 1)
    assert any("eval_rows" in log and "eval_loss" in log for log in trainer.state.log_history)

    tokenizer, (predicted,), rows = build_tokenizer(), received, written(tmp_path)
    assert predicted.predictions.shape == (7, NEW)
    assert (predicted.predictions >= 0).all()
    texts = tokenizer.batch_decode(predicted.predictions, skip_special_tokens=True)
    assert texts == [row["prediction"] for row in rows]
    for ids, row in zip(predicted.label_ids, rows, strict=True):
        real = ids[ids != -100]
        assert tokenizer.decode(real, skip_special_tokens=True) == row["reference"]
        assert (ids[len(real) :] == -100).all()
    inputs = tokenizer.batch_decode(predicted.inputs, skip_special_tokens=True)
    assert inputs == [row["prompt"].strip() for row in rows]


def test_metrics_by_batch_get_all_generated_tokens_at_once(tmp_path):
    def compute_metrics(predicted, compute_result):
        return {"rows": len(predicted.predictions)} if compute_result else {}

    metrics = make("sft", tmp_path, compute_metrics=compute_metrics, batch_eval_metrics=True).evaluate()
    assert metrics["eval_rows"] == 7


def test_a_set_may_be_given_to_evaluate_and_to_predict(tmp_path):
    trainer = make("dpo", tmp_path)
    trainer.evaluate(build_rows("dpo", 5, seed=1), metric_key_prefix="other")
    prompts = [row["prompt"] for row in written(tmp_path, "step_00000_other")]
    assert prompts == build_rows("dpo", 5, seed=1)["prompt"]
    found = trainer.predict(trainer.eval_dataset)
    assert found.predictions.shape[0] == found.label_ids.shape[0] == 7
    with pytest.raises(ValueError, match=r"from the test dataset: .* columns \['chosen_ids'"):
        trainer.predict(trainer.eval_dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"]))


# What stays


def curve(trainer, seed=0):
    torch.manual_seed(seed)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_sampling_in_evaluation_leaves_the_training_as_it_is(tmp_path):
    def run(path, sampling=None, **settings):
        model = build_model(attention_dropout=0.5)
        model.generation_config.update(**sampling or {})
        return make("sft", tmp_path / path, model=model, max_steps=3, eval_strategy="steps", eval_steps=1, **settings)

    sampling = {"do_sample": True, "temperature": 2.0}
    expected = curve(run("without", predict_with_generate=False))
    assert curve(run("with", sampling)) == expected
    assert curve(run("with other dropout", sampling), seed=1) != expected
    for path, settings in (("drawn", sampling), ("greedy", {})):
        run(path, settings, learning_rate=0.0).train()
    first, second, greedy = (
        written(tmp_path / p, f"step_0000{i}") for p, i in (("drawn", 1), ("drawn", 2), ("greedy", 1))
    )
    assert first == second != greedy  # drawn with the same numbers at every evaluation


# Processes


@pytest.mark.matrix
@pytest.mark.slow
def test_two_processes_write_and_measure_what_one_does(tmp_path):
    (tmp_path / "2").mkdir()
    two = logged("multi_gpu", tmp_path / "2", "kit.generation_run")
    one = generation_run.main(str(tmp_path / "1"))
    assert (one.pop("processes"), two.pop("processes")) == (1, 2)
    assert one == two
    assert written(tmp_path / "1") == written(tmp_path / "2")
    assert len(written(tmp_path / "2")) == one["rows"] == 5


# Settings and input


def test_the_models_own_settings_give_one_prediction_for_each_prompt(tmp_path):
    trainer = make("dpo", tmp_path)
    trainer.model.generation_config.update(num_return_sequences=2, num_beams=2, return_dict_in_generate=True)
    trainer.evaluate()
    settings = {"num_return_sequences": 1, "return_dict_in_generate": False}  # beams stay
    expected = alone(trainer, trainer.eval_dataset["prompt"], **settings)
    assert [row["prediction"] for row in written(tmp_path)] == expected
    assert len(set(expected)) > 4  # another prompt's would be seen


CHAT = Dataset.from_list([{"messages": conversation("w2", "w3")}])
UNANSWERED = Dataset.from_list([{"messages": conversation("w2", "w3")[:1] * 2}])

EMPTY = Dataset.from_list([{"prompt": "w2", "completion": "w3"}, {"prompt": "", "completion": "w3"}])

REFUSED = [
    ("dpo", {"eval_dataset": None}, "No `eval_dataset` is given"),
    ("dpo", {"eval_dataset": build_rows("dpo").to_iterable_dataset()}, "of type `IterableDataset`"),
    ("sft", {"eval_dataset": Dataset.from_list([{"text": "w2 w3"}])}, r"the eval dataset.* columns \['input_ids'"),
    ("sft", {"formatting_func": str}, "would ignore `formatting_func`"),
    ("sft", {"eval_dataset": EMPTY}, r"prompt of row 1 \(counted from 0\) .* has no token"),
    (
        "sft",
        {"processing_class": build_chat_tokenizer(), "train_dataset": CHAT, "eval_dataset": UNANSWERED},
        r"roles \['user', 'user'\]: no assistant message follows another",
    ),
]


def test_what_could_not_be_generated_from_is_refused_before_the_first_step(tmp_path):
    model = build_model(vocab_size=80, max_position_embeddings=64)
    for name, settings, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make(name, tmp_path, **settings | {"model": model})
        assert PaddingRemoval.of(model) is None
