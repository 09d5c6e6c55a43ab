"""Published rollouts: groups with the recorded rewards, and errors beforehand."""

from types import SimpleNamespace

import pytest
from datasets import Dataset, IterableDataset
from kit.methods import make_trainer
from kit.online_runs import watch_forwards
from kit.trainer_runs import assert_same, build_model, build_tokenizer, run

import trl_padfix
from trl_padfix import RecordedRollouts


TEMPLATE = (
    "{% for m in messages %}{{ 'w5 ' if m.role == 'assistant' else 'w6 ' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ ' ' + call.function.name + ' ' }}{% endfor %}{{ ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w5 ' }}{% endif %}"
)


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def called(name, number):
    """What an agent calls, and the answer; the id is another one in each trial."""
    calls = [{"id": str(number), "type": "function", "function": {"name": name, "arguments": {"x": 1}}}]
    return [say("assistant", "", tool_calls=calls), say("tool", "w20", tool_call_id=str(number))]


def rollout(task, trial, reward, *messages):
    begin = [say("system", "w10 w11"), say("user", f"w{12 + task}"), *called("w4", f"{task}{trial}")]
    return {"task": task, "trial": trial, "reward": reward, "messages": [*begin, *messages]}


def answer(word, *more):
    return [say("assistant", word), *more]


ROWS = [
    rollout(0, 0, 0.0, *answer("w21"), say("user", "w22"), *answer("w23"), say("user", "w24")),
    rollout(0, 1, 1.0, *answer("w25")),
    rollout(0, 2, 0.0, *answer("w21"), say("user", "w26"), *answer("w27")),
    rollout(1, 0, 0.0, *answer("w28")),
    rollout(1, 1, 0.0, *answer("w29")),
    rollout(1, 2, 0.0, *answer("w30")),
    rollout(2, 0, 1.0, *answer("w31"), say("user", "w32"), *answer("w33")),
    rollout(2, 1, 0.5, *answer("w31"), say("user", "w34"), *answer("w35")),
    rollout(2, 2, 0.5, *answer("w31"), say("user", "w32")),
    rollout(3, 0, 1.0, *answer("w36")),
]


def rollouts(rows=ROWS, **columns):
    return Dataset.from_list([row | columns for row in rows])


def recorded_run(path, **mode):
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    recorded = RecordedRollouts(rollouts(), tokenizer)
    given = {"num_generations": recorded.trials, "per_device_train_batch_size": recorded.trials, "beta": 0.0} | mode
    given |= {"model": build_model(), "reward_funcs": recorded.rewards, "train_dataset": recorded.prompts}
    given |= {"processing_class": tokenizer, "rollout_func": recorded, "max_steps": 2, "max_completion_length": 256}
    trainer = make_trainer(trl_padfix, "GRPO", path, **given)
    return recorded, run(trainer, watch_forwards([]))


def test_grpo_weighs_what_was_recorded_by_its_reward(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    recorded, padded = recorded_run(tmp_path)
    assert recorded.trials == 3
    assert recorded.prompts["prompt"][:] == ["0", "2"]
    # `max_completion_length` does not bound what was recorded.
    _, shared = recorded_run(tmp_path, padding_free=True, prefix_sharing=True, max_tokens_per_batch=255)
    assert_same(shared.trajectory(), padded.trajectory())
    assert shared.entered < padded.entered
    history = padded.trainer.state.log_history
    with pytest.raises(
        ValueError, match=r"A generation takes 3 prompts, and `train_dataset` has 2: .*no step\. Lower"
    ):
        recorded_run(tmp_path, padding_free=True, per_device_train_batch_size=9)
    assert sorted(entry["reward"] for entry in history if "reward" in entry) == pytest.approx([1 / 3, 2 / 3])
    output = recorded(["0"] * 3, None)
    rows = zip(output["completion_ids"], output["env_mask"], strict=True)
    decoded = [build_tokenizer().decode([i for i, said in zip(*row, strict=True) if said]) for row in rows]
    assert decoded == ["w4 <eos> w21 <eos> w23 <eos>", "w4 <eos> w25 <eos>", "w4 <eos> w21 <eos> w27 <eos>"]
    assert output["recorded"] == [0.0, 1.0, 0.0]
    recall = RecordedRollouts.__call__
    for name, wrong in CONTROLS.items():

        def changed(self, *args, name=name, wrong=wrong):
            output = recall(self, *args)
            return output | {name: wrong(output[name])}

        monkeypatch.setattr(RecordedRollouts, "__call__", changed)
        _, other = recorded_run(tmp_path, padding_free=True, prefix_sharing=True)
        with pytest.raises(AssertionError, match="not close"):
            assert_same(other.trajectory(), padded.trajectory())


def test_a_completion_ends_with_the_token_at_which_sampling_ends_and_has_nothing_behind_it_in_a_turn():
    tokenizer = build_tokenizer(chat_template=TEMPLATE.replace("<eos>", "<eos> w7"))
    output = RecordedRollouts(rollouts(), tokenizer)(["0"] * 3, None)
    for ids, mask in zip(output["completion_ids"], output["env_mask"], strict=True):
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.convert_tokens_to_ids("w7") in ids
        assert tokenizer.convert_tokens_to_ids("w7") not in [i for i, said in zip(ids, mask, strict=True) if said]


CONTROLS = {
    "recorded": lambda rewards: rewards[1:] + rewards[:1],  # those of other trials
    "env_mask": lambda masks: [[1] * len(mask) for mask in masks],  # trains on what users and tools said
}


def record(dataset):
    return RecordedRollouts(dataset, build_tokenizer(chat_template=TEMPLATE))


INCOMPARABLE = [
    ([row | {"reward": "good"} for row in ROWS], r"row 0 \(counted from 0\) is not a number: 'good'"),
    ([*ROWS, ROWS[0] | {"task": None}], r"Row 10 \(counted from 0\) of the rollouts dataset has no 'task': {"),
    (ROWS[9:], "nothing to compare: of 1 tasks most have 1 trial"),
    (ROWS[3:6], "the trials of 1 all have one reward"),
    ([*ROWS[:2], ROWS[2] | {"reward": float("nan")}], r"The `reward` of row 2 \(counted from 0\) is not a number"),
]


def test_what_cannot_be_compared_is_an_error():
    for rows, message in INCOMPARABLE:
        with pytest.raises(ValueError, match=message):
            record(Dataset.from_list(rows))


def test_streams_and_groups_that_are_split_are_errors():
    with pytest.raises(TypeError, match="IterableDataset"):
        record(IterableDataset.from_generator(lambda: iter(ROWS)))
    with pytest.raises(ValueError, match="finds nothing to compare: of 0 tasks"):
        record(rollouts().select([]))
    recorded = record(rollouts())
    assert record(rollouts().map(lambda row: {"task": [row["task"]]})).prompts.num_rows == recorded.prompts.num_rows
    with pytest.raises(ValueError, match=r"pass \(a part of\) `recorded.prompts` as the dataset"):
        recorded([[{"role": "user", "content": "Hi"}]], None)
    with pytest.raises(ValueError, match="These completions were not recorded"):
        RecordedRollouts.rewards(["of the policy"])
    for trains, fields in (
        (True, "`num_generations=3`, and `per_device_train_batch_size`"),
        (False, "`num_generations_eval=3`, and `per_device_eval_batch_size`"),
    ):
        trainer = SimpleNamespace(model=SimpleNamespace(training=trains))
        with pytest.raises(ValueError, match=f"asked for 2 of one. Set {fields} to a multiple of it"):
            recorded(["0", "0"], trainer)
    for column in ("task", "reward", "messages"):
        with pytest.raises(ValueError, match=f"The rollouts dataset has no column '{column}'; it has"):
            record(rollouts().remove_columns(column))


def test_a_template_that_changes_earlier_turns_gives_no_one_sequence():
    forgetting = TEMPLATE.replace(
        "{{ m.content or '' }}", "{{ m.content if loop.last or m.role != 'assistant' else '' }}"
    )
    with pytest.raises(ValueError, match="it changes earlier turns"):
        RecordedRollouts(rollouts(), build_tokenizer(chat_template=forgetting))
