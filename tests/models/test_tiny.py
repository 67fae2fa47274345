"""The tiny policy and its tokenizer: any text survives, one seed gives one folder, complete or absent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.data.jsonl import file_sha256
from espalier.data.records import BadInput
from espalier.models.tiny import END, PAD, build_tiny
from espalier.sampling.requests import decode

SHAPE = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 280, "max_length": 64}
TEXTS = ["Mia has 5 apples.\nbuys: 5 + 3 = 8\n#### 8"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\n 0123\0\u2028🙂"), max_size=40)


@given(TEXT.filter(lambda text: PAD not in text and END not in text))
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert decode(tokenizer)(tokenizer(text).input_ids) == text


def test_digits_and_newlines_are_tokens_of_their_own(tokenizer: Any, demonstration_texts: list[str]) -> None:
    for text in demonstration_texts[:20]:
        pieces = [decode(tokenizer)([token]) for token in tokenizer(text).input_ids]
        assert all(len(piece.strip()) == 1 for piece in pieces if any(sign.isdigit() for sign in piece))
        assert all(piece == "\n" for piece in pieces if "\n" in piece)


def test_the_special_tokens_are_the_first_two_and_decode_to_nothing(tokenizer: Any) -> None:
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert decode(tokenizer)([0, 1]) == ""


def test_a_prompt_gets_no_special_tokens(tokenizer: Any) -> None:
    assert tokenizer("Mia").input_ids == tokenizer("Mia", add_special_tokens=False).input_ids


def test_the_vocabulary_is_as_large_as_asked(tokenizer: Any) -> None:
    assert len(tokenizer) == 320


def test_one_seed_gives_one_folder_byte_for_byte(tmp_path: Path) -> None:
    one = build_tiny(tmp_path / "one", TEXTS, seed=3, **SHAPE)
    two = build_tiny(tmp_path / "two", TEXTS, seed=3, **SHAPE)
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert [file_sha256(one / name) for name in names] == [file_sha256(two / name) for name in names]


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    one = build_tiny(tmp_path / "one", TEXTS, seed=3, **SHAPE)
    two = build_tiny(tmp_path / "two", TEXTS, seed=4, **SHAPE)
    assert file_sha256(one / "model.safetensors") != file_sha256(two / "model.safetensors")


def test_building_does_not_move_the_random_state(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    build_tiny(tmp_path / "one", TEXTS, seed=3, **SHAPE)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_folder_that_exists_is_kept_as_it_is(tmp_path: Path) -> None:
    one = build_tiny(tmp_path / "one", TEXTS, seed=3, **SHAPE)
    digest = file_sha256(one / "model.safetensors")
    build_tiny(one, TEXTS, seed=4, **SHAPE)
    assert file_sha256(one / "model.safetensors") == digest


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerFast

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(OSError, match="no space left"):
        build_tiny(tmp_path / "models" / "one", TEXTS, seed=3, **SHAPE)
    assert list(tmp_path.glob("models/*")) == []


def test_the_folder_loads_as_a_policy_that_ends_with_the_end_token(tiny_policy: Path) -> None:
    from espalier.models.load import load_policy, load_tokenizer, max_length_of

    model, tokenizer = load_policy(str(tiny_policy)), load_tokenizer(str(tiny_policy))
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) == 320
    assert max_length_of(str(tiny_policy)) == 512


def test_input_and_output_embeddings_are_not_tied(tiny_policy: Path) -> None:
    from espalier.models.load import load_policy

    model = load_policy(str(tiny_policy))
    assert not torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_policy_can_be_of_another_family(family: str, tmp_path: Path) -> None:
    from espalier.models.load import load_policy

    path = build_tiny(tmp_path / family, TEXTS, seed=0, family=family, **SHAPE)
    model = load_policy(str(path))
    assert model.config.model_type == family
    assert model.config.head_dim * model.config.num_attention_heads == 16


def test_a_family_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="family must be one of llama, qwen2, qwen3, got 'gpt9'"):
        build_tiny(tmp_path / "one", TEXTS, seed=0, family="gpt9", **SHAPE)
