"""What a recipe builds for itself: whole or not at all, and never taken for another model."""

import itertools

import pytest
from transformers import AutoConfig, AutoTokenizer

from trl_padfix.tools.initial_model import RECORD, build_tiny, built_once, fingerprint


def build(folder):
    (folder / "model.safetensors").write_text("weights")


def test_it_is_built_once_and_taken_again(tmp_path):
    def forbidden(folder):
        raise AssertionError("it was there already")

    built = built_once(tmp_path / "model", {"layers": 1, "sizes": (1, 2)}, build)
    assert built == str(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert built_once(tmp_path / "model", {"layers": 1, "sizes": (1, 2)}, forbidden) == built
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_one_is_not_taken_for_it(tmp_path):
    built_once(tmp_path / "model", {"tiny_model": "tiny", "layers": 2}, build)
    with pytest.raises(
        ValueError, match=r"`tiny_model` 'tiny' there and 'small' now, `layers` 2 there and 6 now.*Delete"
    ):
        built_once(tmp_path / "model", {"tiny_model": "small", "layers": 6}, build)
    (tmp_path / "model" / RECORD).unlink()
    with pytest.raises(ValueError, match="an earlier version or another program wrote it"):
        built_once(tmp_path / "model", {"tiny_model": "tiny", "layers": 2}, build)


def test_a_build_that_fails_leaves_nothing_in_the_way(tmp_path):
    def killed(folder):
        build(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built_once(tmp_path / "model", {}, killed)
    assert list(tmp_path.iterdir()) == []
    built_once(tmp_path / "model", {}, build)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_fingerprint_tells_texts_and_their_bounds_apart():
    texts = [["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c", ""], ["ab", "\udce9"]]
    prints = [fingerprint(iter(t)) for t in texts]
    assert all(a != b for a, b in itertools.combinations(prints, 2))
    assert fingerprint(["ab", "c"]) == prints[0]


def test_a_tiny_model_has_an_embedding_for_each_token_of_its_loaded_tokenizer(tmp_path):
    folder = build_tiny("tiny", [{"text": f"w{i} w{i * i % 97}"} for i in range(200)], tmp_path / "model")
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    assert len(tokenizer) == config.vocab_size
    assert max(tokenizer("<|endoftext|> w1")["input_ids"]) < config.vocab_size
