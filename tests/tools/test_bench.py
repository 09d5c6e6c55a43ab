"""`trl_padfix.tools.bench`: three variants of one computation, timed side by side, or no figures at all."""

import dataclasses
import json
import time
from itertools import chain

import numpy as np
import pytest
import torch
import torch._dynamo
from datasets import Dataset
from kit.cells import slow_but
from kit.commands import build_pairs, trl_padfix_command, write_rollouts
from kit.observe import entered_tokens
from kit.trainer_runs import confusing_layout, leaking_layout

from trl_padfix.tools.bench import data as made
from trl_padfix.tools.bench import measure as bench
from trl_padfix.tools.bench import memory, peak
from trl_padfix.tools.bench.building import prepare
from trl_padfix.tools.bench.memory import MemoryCount
from trl_padfix.tools.bench.peak import Peak
from trl_padfix.tools.bench.settings import BenchSettings, VariantResult
from trl_padfix.tools.bench.steps import decoder_inputs
from trl_padfix.trainers.batching.step_plan import StepPlan


# The peak is given: no test depends on how fast this machine is.
TINY = BenchSettings(pairs=2, steps=2, warmup=1, shape="tiny", max_length=64, peak_tflops=1000.0)


GRPO = dataclasses.replace(TINY, trainer="grpo", generations=4, prompt_length=40, completion_length=8)
ONCE = dataclasses.replace(TINY, steps=1, warmup=0, memory=False)
SETTINGS = {"dpo": TINY, "sft": dataclasses.replace(TINY, trainer="sft"), "grpo": GRPO}


def run(data: Dataset | None, settings: BenchSettings) -> list[VariantResult]:
    return bench.measure(prepare(data, settings)).checked()


def pairs_for(trainer: str) -> Dataset | None:
    return None if trainer == "grpo" else build_pairs()  # prompts are drawn


@pytest.fixture(scope="module", params=["dpo", "grpo"])
def results(request) -> dict[str, VariantResult]:
    return {result.name: result for result in run(pairs_for(request.param), SETTINGS[request.param])}


def test_trls_step_and_both_of_ours_are_timed(results):
    assert list(results) == ["trl", "padding_free", "prefix_sharing"]
    for result in results.values():
        assert 0 < result.low <= result.seconds <= result.high
        assert result.tokens_per_second > 0
        assert 0 < result.mfu < 1
    assert results["trl"].speedup == 1.0
    assert 0 < results["prefix_sharing"].peak_gib < results["padding_free"].peak_gib < results["trl"].peak_gib


def test_the_variants_compute_one_loss_and_gradient_on_fewer_tokens(results):
    trl, padding_free, prefix_sharing = results.values()
    for ours in (padding_free, prefix_sharing):
        assert ours.loss == pytest.approx(trl.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(trl.grad_norm, rel=1e-5)
        assert ours.token_limit == pytest.approx(trl.tokens / ours.tokens)
    assert prefix_sharing.tokens < padding_free.tokens < trl.tokens
    assert trl.token_limit == 1.0
    assert trl.grad_norm > 0


def test_a_run_is_repeated_by_its_seed():
    found, again, other = (run(build_pairs(), dataclasses.replace(ONCE, seed=seed)) for seed in (0, 0, 1))
    assert [(r.loss, r.tokens) for r in found] == [(r.loss, r.tokens) for r in again]
    assert not {r.loss for r in found} & {r.loss for r in other}


def test_trls_default_precision_is_float32_weights_under_autocast():
    exact = run(build_pairs(), dataclasses.replace(ONCE, variants=("trl",)))[0].loss
    losses = [result.loss for result in run(build_pairs(), dataclasses.replace(ONCE, dtype="autocast"))]
    assert losses == pytest.approx([exact] * 3, rel=2e-2)
    assert abs(losses[0] - exact) > 1e-5 * exact  # its products are rounded to bfloat16


def test_the_variants_agree_whatever_is_measured():
    results = run(build_pairs(), dataclasses.replace(ONCE, attn="eager", optimizer=False))
    assert [result.loss for result in results] == pytest.approx([results[0].loss] * 3, rel=1e-5)


def test_no_variant_keeps_more_than_the_one_before_it():
    settings = dataclasses.replace(TINY, steps=1, warmup=0)
    trl, padding_free, sharing = run(build_pairs(), settings)
    checkpointed = run(build_pairs(), dataclasses.replace(settings, gradient_checkpointing=True))
    assert 0 < sharing.kept_mib < padding_free.kept_mib < trl.kept_mib
    assert checkpointed[2].kept_mib < checkpointed[1].kept_mib < checkpointed[0].kept_mib < trl.kept_mib / 2


def test_other_batches_of_the_same_rows_give_the_same_loss_and_gradient():
    settings = dataclasses.replace(TINY, steps=4, variants=("trl", "trl_grouped", "padded"))
    trl, grouped, padded = run(build_pairs(), settings)
    assert grouped.loss == pytest.approx(trl.loss, rel=1e-5)
    assert grouped.tokens < trl.tokens == padded.tokens
    assert grouped.steps == trl.steps == 4


@pytest.mark.parametrize("name", ["loss", "grad_projection"])
def test_other_batches_of_other_rows_are_an_error(name):
    figures = {
        variant: [{"loss": 1.0, "grad_projection": 1.0, "grad_norm": 1.0, "weight": 2} for _ in range(2)]
        for variant in ("trl", "trl_grouped")
    }
    figures["trl_grouped"][1][name] = 1.1
    with pytest.raises(RuntimeError, match=f"in all rows its {name} is 1.05 and TRL's 1"):
        bench._check_equal(figures, 1e-4)


SHARED = 200
"""Tokens of a prompt, enough for a prefix forward of its own."""


def one_prompt(trainer: str) -> Dataset:
    """Rows with one long prompt and short completions of their own."""
    pairs = made.pairs_of_lengths(4, SHARED, 8, spread=0)
    pairs = pairs.remove_columns("prompt_ids").add_column("prompt_ids", [pairs["prompt_ids"][0]] * 4)
    if trainer == "dpo":
        return pairs
    rows = [row["prompt_ids"] + row["chosen_ids"] for row in pairs]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


@pytest.mark.parametrize("trainer", ["dpo", "sft"])
def test_under_a_budget_a_step_computes_a_prefix_once(trainer):
    settings = dataclasses.replace(
        SETTINGS[trainer],
        pairs=4,
        steps=1,
        warmup=0,
        max_length=256,
        max_tokens_per_batch=SHARED + 20,
        memory=False,
        variants=("trl", "prefix_sharing", "token_budget"),
    )
    rows = one_prompt(trainer)
    distinct = SHARED + 8 * 4 * (2 if trainer == "dpo" else 1)
    step = prepare(rows, settings)
    entered = entered_tokens(step.trainer.model)
    trl, sharing, budget = bench.measure(step).results
    assert budget.tokens == sharing.tokens == distinct < trl.tokens
    assert sum(entered[-len(entered) + 2 :]) == distinct  # after TRL's forward and the one of `prefix_sharing`
    assert len(entered) > 4  # the prefix and micro-batches
    for name in ("loss", "grad_norm"):
        assert getattr(budget, name) == pytest.approx(getattr(trl, name), rel=1e-5)
    assert trl.grad_norm > 0


def test_a_micro_batch_with_another_weight_is_an_error(monkeypatch):
    settings = dataclasses.replace(ONCE, pairs=4, variants=("trl", "token_budget"))
    monkeypatch.setattr(StepPlan, "weights", lambda plan, rows, *others: np.full(rows, 0.2))  # of 4 rows
    with pytest.raises(RuntimeError, match="token_budget is not the same computation"):
        run(build_pairs(), settings)


def test_trls_step_may_be_left_out():
    settings = dataclasses.replace(ONCE, variants=("padding_free", "prefix_sharing"))
    trl, *ours = run(build_pairs(), dataclasses.replace(settings, variants=("trl", *settings.variants)))
    alone = run(build_pairs(), settings)
    assert [(r.loss, r.token_limit) for r in alone] == [(r.loss, r.token_limit) for r in ours]
    assert trl.token_limit == 1.0 < alone[0].token_limit < alone[1].token_limit
    assert [r.speedup for r in alone] == [None, None]


def test_a_step_that_does_not_fit_is_left_out_with_the_reason(monkeypatch, tmp_path):
    path = tmp_path / "found.json"
    options = "--data lengths:200/5 --spread 0 --pairs 2 --steps 1 --warmup 0 --shape tiny --no-memory --device cpu"
    command = ["bench", *options.split(" "), "--peak-tflops", "1000", "--json", str(path)]
    count = MemoryCount(prepare(made.pairs_of_lengths(2, 200, 5), dataclasses.replace(ONCE, max_length=512)))
    tokens = [(820, (4, 205)), (820, (0, 0)), (420, (0, 0))]
    needed = [count.needed(*given, enough=0) for given in tokens]
    assert needed == sorted(needed, reverse=True)
    monkeypatch.setattr(memory.ModelSizes, "of", lambda config: count._sizes)  # of the same model, counted once
    for free, left_out in [(needed[0] * 2, []), (needed[1] + 1, ["trl"])]:
        monkeypatch.setattr(bench, "free_bytes", lambda device, free=free: free)
        plot = ["--plot", str(tmp_path / "found.png")] if left_out else []  # without TRL's step, too
        result = trl_padfix_command(*command, *plot)
        assert result.exit_code == 0, result.output
        found = json.loads(path.read_text())
        assert [*found["left_out"]] == left_out
        assert ("trl was left out: its largest step computes" in result.output) is bool(left_out)
        assert [v["speedup"] is None for v in found["variants"]] == [bool(left_out)] * (3 - len(left_out))
    monkeypatch.setattr(bench, "free_bytes", lambda device: 1)
    assert "No variant fits into memory" in trl_padfix_command(*command).output


@pytest.mark.slow
@pytest.mark.parametrize("option", [{}, {"gradient_checkpointing": True}, {"attn": "eager"}, {"lora": 4}])
@pytest.mark.parametrize("trainer", SETTINGS)
def test_the_memory_of_a_step_is_counted_as_it_is(trainer, option):
    """The count is compared with the profiler's, without the models."""
    settings = dataclasses.replace(
        SETTINGS[trainer], pairs=4, steps=1, warmup=1, max_length=256, prompt_length=100, variants=("trl",), **option
    )
    data = None if trainer == "grpo" else made.pairs_of_lengths(8, 150, 40)
    if trainer == "sft":
        data = made.synthetic_rows("lengths:150/40", "sft", 8)
    step = prepare(data, settings)
    (result,) = bench.measure(step).results
    shape = tuple(decoder_inputs(step.collate([1] if trainer == "grpo" else [4, 5, 6, 7]))["input_ids"].shape)
    counted = MemoryCount(step).needed(shape[0] * shape[1], shape, enough=0)
    models = sum(p.numel() * p.element_size() for model in step.models for p in model.parameters())
    assert 0.7 < counted / (result.peak_gib * 2**30 - models) < 1.8


def test_adapters_train_on_their_own():
    trl, padding_free, sharing = run(build_pairs(), dataclasses.replace(ONCE, lora=4))
    assert sharing.grad_norm == pytest.approx(trl.grad_norm, rel=1e-4)
    assert padding_free.mfu > 0


@pytest.mark.parametrize("spread", [0, 0.25])
def test_lengths_are_drawn_around_their_means(spread):
    pairs = made.synthetic_rows("lengths:40/10", "dpo", 100, spread)
    lengths = {name: {len(ids) for ids in pairs[name]} for name in pairs.column_names}
    assert (min(lengths["prompt_ids"]), max(lengths["prompt_ids"])) == ((40, 40) if spread == 0 else (30, 50))
    assert lengths["chosen_ids"] | lengths["rejected_ids"] == ({10} if spread == 0 else {*range(7, 13)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"variants": names}, r"names among trl, .*TRL's own comes first")
            for names in [("padding_free", "trl"), ("group_by_prefix", "padding_free"), ("trl", "x"), ()]
        ),
        ({"variants": ("trl", "trl_packing")}, "are SFT's, and the trainer is dpo"),
        ({"logprob_passes": True}, "`logprob_passes` are GRPO's, and the trainer is dpo"),
        ({"trainer": "grpo", "variants": ("trl", "trl_grouped")}, "prompts with all their completions"),
        ({"trainer": "grpo", "variants": ("trl", "token_budget")}, "leave `token_budget` out"),
    ],
)
def test_what_cannot_be_compared_is_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        BenchSettings(**settings)


@pytest.mark.parametrize("lora", slow_but([0], [0, 4]))
def test_grpos_passes_for_log_probabilities_are_counted_in(lora):
    """The reference moves the loss; the passes are two forwards more, of the tokens that a variant computes."""
    settings = dataclasses.replace(
        GRPO, generations=2, steps=1, warmup=0, lora=lora, logprob_passes=True, memory=False
    )
    scored, alone = (run(None, dataclasses.replace(settings, logprob_passes=passes)) for passes in (True, False))
    for results in (scored, alone):
        assert [r.loss for r in results] == pytest.approx([results[0].loss] * 3, rel=1e-4, abs=1e-6)
        assert [r.grad_norm for r in results] == pytest.approx([results[0].grad_norm] * 3, rel=1e-4)
    if not lora:  # new adapters change nothing: the policy is its own reference
        assert abs(scored[0].loss - alone[0].loss) > 1e-4
    step = prepare(None, settings)
    entered = [entered_tokens(model) for model in step.models]
    for result in scored:
        for tokens in entered:
            tokens.clear()
        variant = bench.VARIANTS[result.name]
        with bench.attached(step, variant):
            step.run([0], variant)
        assert [*chain(*entered)] == [result.tokens] * 3


@pytest.mark.parametrize(
    ("trainer", "variant", "broken"),
    [
        ("dpo", "padding_free", leaking_layout),
        ("dpo", "prefix_sharing", confusing_layout),
        ("sft", "padding_free", leaking_layout),
        ("grpo", "padding_free", leaking_layout),
        ("grpo", "prefix_sharing", confusing_layout),
    ],
)
def test_a_broken_layout_gives_an_error_and_no_figures(trainer, variant, broken, monkeypatch):
    monkeypatch.setattr(f"trl_padfix.core.call.layout_of.{variant}_layout", broken)
    with pytest.raises(
        RuntimeError, match=f"{variant} is not the same computation: in step 0 its (loss|grad_norm) is"
    ):
        run(pairs_for(trainer), dataclasses.replace(SETTINGS[trainer], steps=1, warmup=0))


@pytest.mark.parametrize(("trainer", "ragged"), [("sft", True), ("sft", False), ("dpo", False)])
def test_tokens_are_saved_where_there_is_something_to_remove(trainer, ragged):
    data = build_pairs() if ragged else made.synthetic_rows("lengths:1/31", trainer, 12, spread=0)
    results = run(data, dataclasses.replace(ONCE, trainer=trainer))
    padded, padding_free, prefix_sharing = results
    assert [r.loss for r in results] == pytest.approx([padded.loss] * 3, rel=1e-5)
    assert [r.grad_norm for r in results] == pytest.approx([padded.grad_norm] * 3, rel=1e-5)
    assert prefix_sharing.tokens <= padding_free.tokens <= padded.tokens
    assert (padding_free.tokens < padded.tokens) is ragged
    assert padded.grad_norm > 0


def test_too_little_data_is_an_error_that_says_how_much_is_needed():
    with pytest.raises(ValueError, match="The data gives 2 rows, and 6 are needed"):
        run(build_pairs(2), TINY)


# Data that branches


ALL = ("trl", "trl_padding_free", "trl_packing", "padding_free", "prefix_sharing", "auto", "group_by_prefix")


def test_rows_of_a_tree_cost_their_distinct_tokens_and_compare_with_all_that_trl_has():
    tree = made.parse_tree("tree:2x3/24/8")
    settings = dataclasses.replace(TINY, trainer="sft", pairs=6, memory=False, max_length=tree.longest, shuffle=False)
    rows = made.tree_rows(tree, 18)
    found = {r.name: r for r in run(rows, dataclasses.replace(settings, variants=ALL))}
    counted = rows.select(range(6, 18))["input_ids"]
    distinct = sum(len({tuple(ids[: i + 1]) for ids in counted[b : b + 6] for i in range(len(ids))}) for b in (0, 6))
    real = sum(map(len, counted))
    assert 2 * distinct < real
    assert found["prefix_sharing"].tokens == found["auto"].tokens == distinct
    assert found["group_by_prefix"].tokens == distinct  # each step is a tree, in whatever order
    assert found["padding_free"].tokens == found["trl_padding_free"].tokens == found["trl_packing"].tokens == real
    assert [r.loss for r in found.values()] == pytest.approx([found["trl"].loss] * len(ALL), rel=1e-5)
    assert found["trl_packing"].steps >= 2
    assert found["trl"].grad_norm > 0


def test_pairs_branch_from_one_tree_and_are_grouped():
    tree = made.parse_tree("tree:2x3/24/8")
    variants = ("trl", "prefix_sharing", "group_by_prefix")
    settings = dataclasses.replace(TINY, pairs=6, steps=4, warmup=0, memory=False, variants=variants)
    trl, sharing, grouped = run(made.tree_pairs(tree, 24), settings)
    assert grouped.loss == pytest.approx(trl.loss, rel=1e-5)
    assert grouped.tokens < 0.8 * sharing.tokens < trl.tokens


def test_rollouts_are_grouped_as_training_groups_an_epoch(tmp_path):
    data = made.load_examples(write_rollouts(tmp_path / "rollouts.jsonl"), "sft", expand_turns=True)
    variants = ("trl", "padding_free", "auto", "group_by_prefix")
    settings = dataclasses.replace(
        TINY, trainer="sft", pairs=4, steps=3, warmup=1, memory=False, max_length=512, expand_turns=True,
        variants=variants,
    )  # fmt: skip
    step = prepare(data, settings)
    tokenizer = step.trainer.processing_class
    assert sum("look" in tokenizer.decode(row["input_ids"]) for row in step.rows) == len(step.rows) == 16
    groups = [{tokenizer.decode(row["input_ids"]).split("find the ")[1].split("<")[0] for row in step.rows[:4]}]
    assert len(groups[0]) == 1  # the step before the counted ones is the rows of one task, of an epoch of 24
    found = {r.name: r for r in bench.measure(step).results}
    assert found["group_by_prefix"].tokens < 0.8 * found["auto"].tokens < found["padding_free"].tokens
    assert found["group_by_prefix"].loss == pytest.approx(found["trl"].loss, rel=1e-5)
    # Batches that share more need less arithmetic.
    needed = {name: r.mfu * sum(r.step_seconds) for name, r in found.items()}
    assert needed["group_by_prefix"] < 0.9 * needed["auto"] == pytest.approx(0.9 * needed["trl"], rel=1e-3)


@pytest.mark.parametrize("data", ["tree:", "tree:4/600/80", "tree:0x8/600/80", "tree:4x8/600/3"])
def test_sizes_that_are_no_tree_are_an_error(data):
    with pytest.raises(ValueError, match="write `tree:ROLLOUTSxTURNS/SYSTEM/TURN`"):
        made.parse_tree(data)


@pytest.mark.slow
def test_linear_attention_shares_a_tree():
    tree = made.parse_tree("tree:2x2/16/8")
    settings = dataclasses.replace(TINY, trainer="sft", pairs=4, steps=1, shape="hybrid-tiny", shuffle=False)
    trl, packed, sharing = run(made.tree_rows(tree, 8), settings)
    assert sharing.tokens < packed.tokens < trl.tokens
    assert sharing.loss == pytest.approx(trl.loss, rel=1e-5)


# Figures


def test_a_step_ends_at_its_deadline():
    settings = dataclasses.replace(ONCE, steps=3, variants=("trl",))
    step = prepare(build_pairs(), settings)
    with pytest.raises(TimeoutError, match="No counted step"):
        bench.measure(step, deadline=time.monotonic() - 1)
    run = step.run
    now = time.monotonic()

    def slow(*args):  # the second batch ends after the deadline
        slow.calls += 1
        if slow.calls == 2:
            gpu_time[0] = now + 100
        return run(*args)

    slow.calls, gpu_time = 0, [now]
    step.run = slow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.time, "monotonic", lambda: gpu_time[0])
        (result,) = bench.measure(step, deadline=now + 50).results
    assert result.steps == 2


def test_impossible_figures_are_printed_before_the_error(tmp_path):
    options = "--data equal --shape tiny --pairs 2 --steps 1 --warmup 0 --max-length 64 --no-memory --peak-tflops 1e-9"
    result = trl_padfix_command("bench", *options.split(), "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "equal in all variants" in result.output.split("No step does more than the device can")[0]
    found = json.loads((tmp_path / "found.json").read_text())
    assert "No step does more" in found["impossible"]
    assert len(found["variants"]) == 3


def clocked(monkeypatch, *seconds: float) -> None:
    """Let matrix products seem to take so many seconds, one after another."""
    readings = iter([t for i, passed in enumerate(seconds) for t in (10.0 * i, 10.0 * i + passed)])
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(readings))
    monkeypatch.setattr(peak, "SIZES", {"cpu": (16,)})


def test_the_peak_is_the_best_that_was_seen_in_the_fastest_precision(monkeypatch):
    clocked(monkeypatch, 4.0, 0.5, 0.25, 1.0)  # bfloat16 without instructions for it, and three times float32
    best = Peak("cpu", [torch.bfloat16, torch.float32])
    best.measure()
    assert best.share(2 * 16**3, 1.0) == pytest.approx(0.5)
    for _ in range(2):
        best.measure()
    assert best.tflops == pytest.approx(2 * 16**3 / 0.25 / 1e12)
    assert Peak("cpu", [torch.float32], given=1.0).share(5e11, 1.0) == 0.5


# The command


OPTIONS = ["--data", "lengths:9/5", "--pairs", "1", "--steps", "3", "--warmup", "0", "--shape", "tiny", "--no-memory"]
OPTIONS += ["--device", "cpu"]


@pytest.mark.matrix
@pytest.mark.slow
def test_compiled_variants_are_measured_and_compiled_once(tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    path = tmp_path / "figures.json"
    result = trl_padfix_command("bench", *OPTIONS, "--compile", "--compile-backend", "aot_eager", "--json", str(path))
    assert result.exit_code == 0, result.output
    names = [variant["name"] for variant in json.loads(path.read_text())["variants"]]
    packed = ["padding_free", "prefix_sharing"]
    assert names == ["trl", *packed, *(f"{name}_compiled" for name in packed)]
    # Policy and reference, with keys of their own and with shared ones: no step compiles again.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    torch._dynamo.reset()


def test_grpo_needs_no_data(tmp_path):
    path = tmp_path / "figures.json"
    grpo = ["--trainer", "grpo", "--generations", "2", "--prompt-length", "20", "--completion-length", "8"]
    result = trl_padfix_command("bench", *OPTIONS[2:], *grpo, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "GRPO step without generation, 1 x 2 completions" in result.output
    saved = json.loads(path.read_text())
    assert (saved["data"], saved["settings"]["prompt_length"]) == ("random", 20)
