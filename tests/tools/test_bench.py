"""`python benchmarks/bench.py`: times beside TRL's, of steps that are the same computation."""

import json
import re

import bench
import pytest
import torch
from bench import Settings, attached, measure, prepare, select_rows
from kit.cells import slow_but
from kit.observe import entered_tokens
from kit.trainer_runs import build_pairs, leaking_layout

from trl_padfix import prefix_sharing_layout


TINY = ["--shape", "tiny", "--pairs", "2", "--steps", "2", "--warmup", "1", "--device", "cpu", "--no-memory"]


def run(capsys, *options: str) -> str:
    bench.main([*TINY, *options])
    return capsys.readouterr().out


def step_of(data: str | None, **settings) -> bench.BenchStep:
    given = Settings(**{"shape": "tiny", "pairs": 2, "steps": 1, "warmup": 0, "memory": False} | settings)
    return prepare(select_rows(data, given)[0], given)


# -- the command


def test_a_speed_up_is_the_ratio_of_the_times_beside_it(capsys, tmp_path):
    options = ["--data", "lengths:24/6", "--variants", "trl,padding_free,auto", "--group-by-prefix"]
    printed = run(capsys, *options, "--json", str(tmp_path / "figures.json"))
    saved = json.loads((tmp_path / "figures.json").read_text())["variants"]
    assert [variant["name"] for variant in saved] == ["trl", "padding_free", "auto", "group_by_prefix"]
    for variant in saved:
        key = "total_seconds" if variant["name"] == "group_by_prefix" else "seconds"
        assert variant["speedup"] == saved[0][key] / variant[key]
    assert sum(saved[0]["step_seconds"]) == pytest.approx(saved[0]["total_seconds"], abs=1e-5)
    for table in re.split(r"The same \d+ rows", printed):
        rows = re.findall(r"^(\w+) +([\d.e-]+) +\S+-\S+ +([\d.]+)  ", table, re.MULTILINE)
        assert rows[0][0] == "trl"
        for _, seconds, ratio in rows:
            # Both times are rounded to four digits, the ratio to two decimals.
            assert float(ratio) == pytest.approx(float(rows[0][1]) / float(seconds), rel=1e-3, abs=0.006)
    assert printed.count("x TRL") == 2
    assert "equal in all variants" in printed


MISTAKES = [
    (["--data", "nowhere.jsonl"], "There is no file nowhere.jsonl"),
    (["--data", "lengths:5"], "gives no lengths"),
    (["--data", "tree:0x1/1/8"], "gives no sizes"),
    (["--data", "equal", "--variants", "ours"], "`variants` are names among"),
    (["--data", "equal", "--variants", "padding_free,trl"], "TRL's own comes first"),
    (["--data", "equal", "--variants", "trl,trl_packing"], "are SFT's"),
    (["--data", "equal", "--expand-turns"], "makes rows for sft"),
    (["--trainer", "grpo", "--group-by-prefix"], "cannot be regrouped"),
    (["--trainer", "grpo", "--data", "equal"], "is for dpo and sft"),
    (["--data", "pairs.jsonl", "--pairs", "99"], "297 are needed"),
    (["--data", "texts.jsonl"], "dpo needs `chosen` and `rejected`"),
    (["--data", "equal", "--pairs", "0"], "0 is less than 1"),
]


def test_a_mistake_is_said_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure", lambda *args: pytest.fail("measured"))
    build_pairs(12).to_json("pairs.jsonl")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    for options, message in MISTAKES:
        with pytest.raises(SystemExit, match="2"):
            bench.main([*TINY, *options])
        assert message in " ".join(capsys.readouterr().err.split())


def test_the_gpu_is_measured_where_there_is_one(monkeypatch):
    for has_gpu, device in {True: "cuda", False: "cpu"}.items():
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=has_gpu: found)
        assert bench.settings_of(bench.parse_arguments([])[1]).device == device
    with pytest.raises(ValueError, match="no CUDA GPU"):
        bench.settings_of(bench.parse_arguments(["--device", "cuda"])[1])


# -- the same computation


def test_there_are_no_figures_if_the_variants_differ(monkeypatch, capsys):
    monkeypatch.setattr("trl_padfix.core.call.layout_of.padding_free_layout", leaking_layout)
    with pytest.raises(SystemExit) as stopped:
        run(capsys, "--data", "lengths:24/6", "--variants", "trl,padding_free")
    assert "padding_free is not the same computation" in str(stopped.value)
    assert "x TRL" not in capsys.readouterr().out


CELLS = {
    "pairs": ("lengths:24/6", {}),
    "a hybrid": ("lengths:24/6", {"shape": "hybrid-tiny"}),
    "a tree of rows": ("tree:2x2/24/8", {"trainer": "sft", "pairs": 4, "shuffle": False}),
    "completions": (None, {"trainer": "grpo", "pairs": 1, "generations": 3, "prompt_length": 12}),
}


@pytest.mark.parametrize("cell", slow_but(["pairs", "a tree of rows", "completions"], CELLS))
def test_the_counted_tokens_enter_the_decoder(cell):
    data, settings = CELLS[cell]
    step = step_of(data, **settings)
    results = {result.name: result for result in measure(step)}
    rows = list(range(step.settings.batch_rows))
    for name, result in results.items():
        with attached(step, bench.VARIANTS[name]), entered_tokens(step.trainer.model) as entered:
            step.run(rows, bench.VARIANTS[name])
        assert sum(entered) == result.tokens
        assert result.token_limit == results["trl"].tokens / result.tokens
    layout = prefix_sharing_layout(**bench.decoder_inputs(step.collate(rows)))
    counts = (results["trl"].tokens, results["padding_free"].tokens, results["prefix_sharing"].tokens)
    assert counts[1:] == (layout.real_tokens, layout.packed_tokens)
    assert counts[0] > counts[1]


def test_memory_is_that_of_a_step():
    padded, _, shared = measure(step_of("lengths:96/8", memory=True))
    assert padded.kept_mib > 1.5 * shared.kept_mib > 0
    assert padded.peak_gib > shared.peak_gib > 0
