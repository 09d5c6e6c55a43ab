"""Each distinct token of a batch is computed once: gradients, token counts, and how long states are kept."""

import contextlib
import weakref

import pytest
import torch
from kit.budget_runs import build_branching, make
from kit.cells import slow_but
from kit.observe import entered_tokens
from kit.tolerance import assert_close
from peft import LoraConfig, get_peft_model
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from torch.utils._pytree import tree_leaves
from zoo.families import build as build_family
from zoo.model_numbers import assert_same_gradients, gradients
from zoo.models import SUPPORTED, batch, build

import trl_padfix
from trl_padfix import DPOConfig, remove_padding
from trl_padfix.core.call.prefix_states import ForwardStates
from trl_padfix.core.context import within
from trl_padfix.core.errors import PaddingRemovalError
from trl_padfix.core.layout import shared_prefixes as planning
from trl_padfix.core.layout.build import prefix_sharing_layout
from trl_padfix.core.remove import attach_runner_patch
from trl_padfix.trainers.batching import prefix_schedule
from trl_padfix.trainers.batching.bin_packing import RowSplitter
from trl_padfix.trainers.batching.part_runner import PartRunner
from trl_padfix.trainers.batching.prefix_schedule import PrefixSchedule, sharing_obstacle
from trl_padfix.trainers.data.batch_rows import BatchParts


pytestmark = pytest.mark.usefixtures("every_shared_prefix_pays")

PARTS = {
    "depth first": [[4], [0], [5, 1], [2], [3, 6]],
    "nested": [[0, 2], [1, 3], [4, 5], [6]],
    "scattered": [[0, 6], [3], [5, 4], [2], [1]],
}
ENOUGH = 10**6
LOGITS = 8.0
"""Their size, of which a score is a difference."""
STATES = [(name, None) for name in ("qwen3_next", "qwen3_5_text", "kimi_linear", "granitemoehybrid", "bamba", "lfm2")]
"""Models with recurrences and short convolutions, whose states are handed on."""


def built(name, implementation):
    return build_family(name) if implementation is None else build(name, implementation)


def score(model, ids, mask, with_experts=False):
    """
    Log-probabilities of the real tokens behind a real token, by row, nonlinear in what is in one row; plus the
    load-balancing loss of experts.
    """
    output = model(input_ids=ids, attention_mask=mask, use_cache=False)
    balancing = output.get("aux_loss") if with_experts else None
    logps = output.logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return (logps * (mask[:, :-1] * mask[:, 1:])).sum(1).div(5).sin() + (0 if balancing is None else balancing)


def take_gradients(model):
    found = gradients(model)
    model.zero_grad()
    return found


def whole(model, ids, mask):
    with remove_padding(model, prefix_sharing=True):
        score(model, ids, mask).sum().backward()
    return take_gradients(model)


@contextlib.contextmanager
def planned(model, ids, mask, parts, budget=ENOUGH, gather=None, with_head=False):
    """A block with a runner of chunks, and their ids and masks."""
    batches = [(ids[part], mask[part]) for part in parts]
    with remove_padding(model, prefix_sharing=True), attach_runner_patch(model):
        plan = planning.plan_shared_prefixes(batches, budget, gather)
        rows = [torch.tensor(part) for part in parts]
        split = BatchParts(rows, [slice(None)] * len(rows), len(ids), 1, None, plan)
        runner = PartRunner(RowSplitter(budget, True), parts=split, with_head=with_head)
        with within(runner=runner):
            yield runner, batches


def in_chunks(model, *args, **given):
    """
    Each part with a backward of its own: gradients, the tokens of each forward, and those that are computed twice by
    intention.
    """
    with planned(model, *args, **given) as (runner, batches), entered_tokens(model) as entered:
        for i, (ids, mask) in enumerate(batches):
            runner.start(i, ids, mask)
            score(model, ids, mask).sum().backward()
        runner.check()
    again = sum(len(prefix.tokens) for prefix in runner.parts.plan.prefixes.values() if prefix.recompute)
    return take_gradients(model), entered, again


FAST = [("qwen2", "sdpa", ENOUGH), ("gpt_oss", "eager", 12), ("gemma2", "flash_attention_2", ENOUGH)]
FAST += [("qwen3_next", None, 12)]


@pytest.mark.parametrize(
    ("name", "implementation", "budget"),
    slow_but(FAST, dict.fromkeys([*FAST, *((*model, 12) for model in [*dict(SUPPORTED).items(), *STATES])])),
)
def test_chunks_have_the_gradient_of_one_forward(name, implementation, budget):
    ids, mask = batch("mixed")
    flash = flash_attention_stand_in() if str(implementation).startswith("flash") else contextlib.nullcontext()
    with flash:
        model = built(name, implementation).train()
        expected = whole(model, ids, mask)
        distinct, twice = prefix_sharing_layout(ids, mask).packed_tokens, []
        for parts in PARTS.values():
            found, entered, again = in_chunks(model, ids, mask, parts, budget)
            assert_same_gradients(found, expected)
            assert sum(entered) == distinct + again
            twice.append(again)
        assert any(twice) == (budget < ENOUGH)


ROWS = [0, 1, 2, 3, 4, 5, 6, 0]


def test_prefixes_of_another_process_are_run_and_change_nothing():
    """As under FSDP2, where all processes run like forwards: here with one token each."""
    ids, mask = batch("right")
    model = build("qwen2").train()
    ids, mask = ids[ROWS], mask[ROWS]
    expected, distinct = whole(model, ids, mask), prefix_sharing_layout(ids, mask).packed_tokens
    for parts in ([[0, 4], [7], [5, 1, 2], [3, 6]], [[0], [1, 3], [2, 4], [5], [6, 7]]):
        last = len(parts) - 1

        def gather(own, last=last):
            return [*own, ((0, last), True), ((0, 2), False), ((1, 2), False), ((2, 3), False)]

        plan = planning.plan_shared_prefixes([(ids[part], mask[part]) for part in parts], ENOUGH, gather)
        prefixes, filler = plan.prefixes.values(), sum(layout.filler or 0 for layout in plan.layouts.values())
        found, entered, again = in_chunks(model, ids, mask, parts, ENOUGH, gather)
        assert_same_gradients(found, expected)
        assert len(entered) == len(parts) + sum(len(prefix.layouts) for prefix in prefixes)
        dummies = sum(len(prefix.layouts) for prefix in prefixes if not len(prefix.tokens))
        assert sum(entered) == distinct + again + filler + dummies
        assert dummies
    assert filler  # the row that is there twice computes nothing of its own


@pytest.mark.parametrize(("name", "budget"), [("qwen3_moe", ENOUGH), ("gpt_oss", 12)])
def test_a_prefix_that_runs_through_the_head_has_no_load_balancing_loss(name, budget):
    """As under FSDP2, where a prefix is a forward of the whole model, which has router logits of its tokens only."""
    ids, mask = batch("mixed")
    model = build(name, "eager", output_router_logits=True).train()
    expected, distinct = whole(model, ids, mask), prefix_sharing_layout(ids, mask).packed_tokens
    for parts in PARTS.values():
        found, entered, again = in_chunks(model, ids, mask, parts, budget, with_head=True)
        assert_same_gradients(found, expected)
        assert sum(entered) == distinct + again
    output = model(input_ids=ids, attention_mask=mask, use_cache=False)
    assert output.aux_loss > 0  # a whole batch still has one
    assert len(output.router_logits) == model.config.num_hidden_layers


def in_one_forward(model, ids, mask, budget, across=True):
    """A loss that compares rows, whose forward is computed in sub-batches."""
    with remove_padding(model, prefix_sharing=True), attach_runner_patch(model), entered_tokens(model) as entered:
        with within(runner=PartRunner(RowSplitter(budget, True, lambda: across))):
            of_row = score(model, ids, mask, with_experts=True)
        (of_row.sort().values * torch.arange(float(len(ids)))).sum().backward()
    return of_row.detach(), take_gradients(model), sum(entered)


@pytest.mark.parametrize(
    ("name", "implementation"),
    slow_but([("qwen3_moe", "sdpa"), ("lfm2", None)], [*dict(reversed(SUPPORTED)).items(), *STATES]),
)
def test_sub_batches_of_a_forward_have_the_outputs_and_the_gradient_of_the_whole(name, implementation, monkeypatch):
    ids, mask = batch("both")
    flash = flash_attention_stand_in() if str(implementation).startswith("flash") else contextlib.nullcontext()
    with flash:
        model = built(name, implementation).train()
        rows, expected, _ = in_one_forward(model, ids, mask, ENOUGH)
        distinct = prefix_sharing_layout(ids, mask).packed_tokens
        for budget in (14, 20):
            found, grads, tokens = in_one_forward(model, ids, mask, budget)
            assert_close(found, rows, terms=64, depth=24, size=LOGITS)
            assert_same_gradients(grads, expected)
            assert distinct < tokens < 2 * distinct  # all but the last sub-batch twice
        monkeypatch.setattr(torch.Tensor, "argsort", lambda x: torch.arange(len(x)))  # the control: in a wrong order
        with pytest.raises(AssertionError, match="off by"):
            assert_same_gradients(in_one_forward(model, ids, mask, 20)[1], expected)


KINDS = {"keys": torch.nn.Module, "states": tuple, "hidden": int}


@pytest.mark.parametrize("left_out", KINDS)
def test_without_the_gradients_of_leaves_it_is_another_gradient(left_out, monkeypatch):
    ids, mask = batch("right")
    model = build_family("qwen3_next").train()
    expected = whole(model, ids, mask)
    closes = PrefixSchedule._pending_backward

    def but_one_kind(schedule):
        for n in (n for n in schedule.graph_states if schedule.plan.prefixes[n].last_user == schedule.index):
            schedule.graph_states[n] = ForwardStates(
                {k: x for k, x in schedule.graph_states[n].items() if not isinstance(k, KINDS[left_out])}
            )
        return closes(schedule)

    monkeypatch.setattr(PrefixSchedule, "_pending_backward", but_one_kind)
    found, *_ = in_chunks(model, ids, mask, PARTS["depth first"])
    with pytest.raises(AssertionError, match="off by"):
        assert_same_gradients(found, expected)


def test_checkpointed_layers_and_adapters_have_the_gradient_of_one_forward():
    ids, mask = batch("left")
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[1], init_lora_weights=False)
    adapted = get_peft_model(build("qwen2"), adapters).get_base_model()
    for inner in (build("qwen2").train(), adapted.train(), build_family("qwen3_next").train()):
        inner.enable_input_require_grads()
        expected = whole(inner, ids, mask)
        inner.gradient_checkpointing_enable({"use_reentrant": False})
        for parts in PARTS.values():
            assert_same_gradients(in_chunks(inner, ids, mask, parts, 12)[0], expected)
        assert_same_gradients(in_one_forward(inner, ids, mask, 14)[1], in_one_forward(inner, ids, mask, ENOUGH)[1])


def test_sums_over_many_chunks_are_in_float32():
    """Rows of one prompt, each a chunk: under autocast as near to float32 as one forward is."""
    ids = torch.randint(2, 39, (48, 24), generator=torch.Generator().manual_seed(0))
    ids[:, :20] = ids[0, :20]
    mask, model = torch.ones_like(ids), build("qwen2").train()
    exact = whole(model, ids, mask)
    off = []
    for parts in ([list(range(48))], [[row] for row in range(48)]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = in_chunks(model, ids, mask, parts)[0] if len(parts) > 1 else whole(model, ids, mask)
        off.append(sum(float((found[n] - exact[n]).norm()) ** 2 for n in exact) ** 0.5)
    assert off[1] < 1.2 * off[0]


def test_schedules_without_gradients_keep_plain_states_while_they_are_needed():
    (ids, mask), parts = batch("right"), PARTS["depth first"]
    model = build("qwen2")
    with torch.no_grad():
        with remove_padding(model, prefix_sharing=True):
            expected = score(model, ids, mask)
        with planned(model, ids, mask, parts, budget=8) as (runner, batches):
            for i, part in enumerate(parts):
                runner.start(i, *batches[i])
                assert_close(score(model, *batches[i]), expected[part], terms=64, depth=24, size=LOGITS)
                ((schedule,),) = runner._schedules.values()
                alive = {n for n, t in runner.parts.plan.prefixes.items() if t.first_user <= i <= t.last_user}
                assert schedule.states.keys() == alive
                states = [x for n in alive for xs in schedule.states[n].values() for x in xs]
                assert not any(x.requires_grad for x in states)


def test_sub_batches_without_gradients_free_a_prefix_after_its_last_user(monkeypatch):
    model = build("qwen2")
    families = torch.randint(model.config.vocab_size, (4, 1, 12)).expand(4, 2, 12)
    ids = torch.cat([families, torch.randint(model.config.vocab_size, (4, 2, 4))], dim=2).flatten(0, 1)
    mask = torch.ones_like(ids)
    run, kept, alive = prefix_schedule._run_prefix_forward, [], []

    def recorded(*args):
        states = run(*args)
        kept.append(weakref.ref(states))
        alive.append(sum(reference() is not None for reference in kept))
        return states

    monkeypatch.setattr(prefix_schedule, "_run_prefix_forward", recorded)
    splitter = RowSplitter(18, True, shares_across=lambda: True)
    sharing = remove_padding(model, prefix_sharing=True)
    with torch.no_grad(), sharing, attach_runner_patch(model), within(runner=PartRunner(splitter)):
        score(model, ids, mask)
    assert len(kept) == 4
    assert max(alive) <= 2


def test_recomputed_forwards_name_their_device(monkeypatch):
    """A checkpoint restores the random states of the devices of its arguments only: else a GPU draws other dropout."""
    run, have_tensors = prefix_schedule.checkpoint, []

    def recorded(function, *args, **kwargs):
        have_tensors.append(any(isinstance(x, torch.Tensor) for x in tree_leaves(args)))
        return run(function, *args, **kwargs)

    monkeypatch.setattr(prefix_schedule, "checkpoint", recorded)
    in_one_forward(build("qwen2").train(), *batch("right"), 14)
    assert len(have_tensors) > 3
    assert all(have_tensors)


def test_a_chunk_without_its_forward_is_an_error():
    model = build("qwen2")
    with planned(model, *batch("right"), PARTS["depth first"]) as (runner, batches):
        runner.start(0, *batches[0])
        score(model, *batches[0]).sum().backward()
        runner.start(2, *batches[2])
        with pytest.raises(PaddingRemovalError, match="called the model for some sub-batches and not for others"):
            score(model, *batches[2])
        with pytest.raises(PaddingRemovalError, match="gradients are missing"):
            runner.check()


@pytest.mark.parametrize("seed", range(3))
def test_drawn_trees_in_drawn_parts_cover_each_token_once(seed):
    """Each token of a part is its own or one of a shared prefix that it reads; each token has one owner."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 2, (9, 6), generator=draw)
    mask = (torch.arange(6) < torch.randint(1, 7, (9, 1), generator=draw)).long()
    parts = torch.randperm(9, generator=draw).split([2, 3, 1, 2, 1])
    found = planning.plan_shared_prefixes([(ids[part], mask[part]) for part in parts], 5)
    layouts = [*found.layouts.values(), *(prefix.layouts[prefix.first_user] for prefix in found.prefixes.values())]
    assert sum(layout.computed_tokens for layout in layouts) == prefix_sharing_layout(ids, mask).packed_tokens
    for n, prefix in found.prefixes.items():
        assert all(m < n for m in prefix.layouts[prefix.first_user].prefixes)
        assert {layout.computed_tokens for layout in prefix.layouts.values()} == {len(prefix.tokens)}
    for part, layout in zip(parts, found.layouts.values(), strict=True):
        outer = sum(len(found.prefixes[n].tokens) for n in layout.prefixes)
        assert layout.packed_tokens == outer + layout.computed_tokens
        # Each real token of the part is computed where its packed token has its id and its position.
        assert torch.equal(ids[part].flatten()[layout.packed_index][layout.source], ids[part][mask[part].bool()])
        place = torch.arange(6).expand(len(part), 6)[mask[part].bool()]
        assert torch.equal(layout.positions[layout.source], place)


def reason(name="qwen2", is_sharded=False, on_model=lambda model: None, **config):
    model = build(name).train()
    on_model(model)
    settings = {"gradient_checkpointing": False, "use_cpu": True, "bf16": False}
    with remove_padding(model, prefix_sharing=True) as handle:
        return sharing_obstacle(handle, DPOConfig(**settings | config), is_sharded)


def test_what_cannot_read_the_states_of_other_forwards_is_named():
    checkpoints = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    assert reason() is None
    assert reason(**checkpoints | {"gradient_checkpointing_kwargs": {"use_reentrant": False}}) is None
    assert "reentrant gradient checkpointing" in reason(**checkpoints)
    assert reason(on_model=lambda model: model.eval(), **checkpoints) is None
    assert "reentrant gradient checkpointing" in reason(
        on_model=lambda model: model.gradient_checkpointing_enable({"use_reentrant": True})
    )
    # As TRL does for forwards without gradients; the function that it leaves has no settings.
    assert reason(on_model=lambda model: model.gradient_checkpointing_disable()) is None
    assert "equally many forwards" in reason(is_sharded=True)
    with remove_padding(build_family("mamba"), prefix_sharing=True) as handle:
        assert "passes no state to" in sharing_obstacle(handle, None, False)


REASONS = {  # settings, and why the trainer then shares fewer prefixes
    "reentrant checkpoints": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "Each sub-batch recomputes the prefixes that it shares with other sub-batches: reentrant",
    ),
    "nothing": ({}, ""),
}


@pytest.mark.parametrize("case", REASONS)
def test_a_run_prints_once_why_it_shares_less(case, tmp_path, capsys):
    config, why = REASONS[case]
    budget = {"prefix_sharing": "auto", "max_tokens_per_batch": 44}
    data = {"train_dataset": build_branching("SFT", prompts=3)}
    make(trl_padfix, "SFT", tmp_path, budget=True, **data | budget | config).train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "prefix" in line and not line.startswith("{")]
    assert [line.startswith(why) for line in lines] == ([True] if why else [])


@pytest.mark.parametrize("name", ["qwen2", "qwen3_next"])
def test_sub_batches_share_nothing_with_each_other_if_a_row_has_masked_tokens_between_real_ones(name):
    """A recurrent layer would run over them in a padded part, and not in the forward of a prefix."""
    model, (ids, mask) = build_family(name), batch("mixed")
    splitter = RowSplitter(24, True, shares_across=lambda: True)
    assert splitter.split(ids, mask).plan is not None
    assert len(RowSplitter(10**3, True, shares_across=pytest.fail).split(ids, mask).rows) == 1  # it fits: nobody asks
    row = int(mask.sum(1).argmax())
    mask[row, mask[row].nonzero()[1]] = 0
    assert splitter.split(ids, mask).plan is None
    with remove_padding(model, prefix_sharing=True) as handle, attach_runner_patch(model):
        with handle.disabled():
            score(model, ids, mask).sum().backward()
        padded = take_gradients(model)
        with within(runner=PartRunner(splitter)):
            score(model, ids, mask).sum().backward()
    assert_same_gradients(take_gradients(model), padded)
