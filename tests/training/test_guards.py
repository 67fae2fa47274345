"""What a data set is told before it is trained on: each guard speaks, with its numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from espalier.data.examples.example_facts import num_loss_tokens
from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample, TokenExample, keep_short
from espalier.data.left_out import count_left_out
from espalier.data.records import BadInput
from espalier.models.load import BadModel, load_end_ids, load_tokenizer
from espalier.models.tokenizer_checks import (
    Limits,
    check_stop_tokens,
    check_tokenizer,
    model_limits,
    stop_token_faults,
    tokenizer_differences,
)
from espalier.training.guards import (
    check_amount,
    check_evaluations,
    check_held_out,
    check_limits,
    check_margins,
    check_rate,
    without_unread,
)

END = 1
LIMITS = Limits("policy", vocabulary=100, positions=8, ends=frozenset({END}))
GOOD = TokenExample("a", [5, 6, 7, END], 2)


def check_examples(examples: list[Any], path: str, limits: Limits, max_length: int | None = None) -> list[Any]:
    """What a run does: the first when examples are stored, the second whenever they are read."""
    kept = without_unread(examples, path)
    check_limits(kept, path, limits, max_length)
    return kept


def test_a_good_example_passes_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    pair = PairExample("p", [5, 6], [7, END], [8, 9, END])
    steps = StepExample("s", [5, 6, 7], [1, 2], [0.5, 1.0])
    for example in (GOOD, pair, steps, OutcomeExample("o", [5, 6, END], 1, 1.0)):
        assert check_examples([example], "f.jsonl", LIMITS, 8) == [example]
    assert caplog.text == ""


def test_a_margin_needs_scores_and_an_objective_that_reads_it() -> None:
    plain, scored = PairExample("p", [5], [6], [7]), PairExample("q", [5], [6], [7], margin=0.5)
    check_margins([plain], {}, {}, "f.jsonl")
    check_margins([plain], {"margin_scale": 0.0}, {"has_score_margin": False}, "f.jsonl")
    check_margins([plain, scored], {"margin_scale": 1.0}, {"has_score_margin": True}, "f.jsonl")
    with pytest.raises(BadInput, match=r"margin_scale=1 has no margins to scale: set examples.has_score_margin=true"):
        check_margins([plain], {"margin_scale": 1.0}, {"has_score_margin": False}, "f.jsonl")
    for objective in ({"margin_scale": 0.0}, {"beta": 0.1}):
        with pytest.raises(BadInput, match=r"no objective reads the margins of examples.has_score_margin=true"):
            check_margins([scored], objective, {"has_score_margin": True}, "f.jsonl")
    with pytest.raises(BadInput, match=r"f.jsonl: chosen and rejected have one score in all of 1 pairs"):
        check_margins([plain], {"margin_scale": 1.0}, {"has_score_margin": True}, "f.jsonl")


def test_what_the_loss_reads_is_counted_by_hand() -> None:
    assert num_loss_tokens(GOOD) == 2
    assert num_loss_tokens(TokenExample("a", [5, 6, 7, END], 0)) == 3, "nothing predicts the first token"
    assert num_loss_tokens(TokenExample("a", [5, 6, 7, END], 1, [0.0, 0.5, -1.0])) == 2
    assert num_loss_tokens(PairExample("p", [5], [6, 7], [8])) == 3
    assert num_loss_tokens(StepExample("s", [5, 6, 7], [0, 2], [0.5, 1.0])) == 2
    assert num_loss_tokens(StepExample("s", [5, 6, 7], [0, 2], [0.5, 1.0], [0.0, 2.0])) == 1
    assert num_loss_tokens(OutcomeExample("o", [5, 6, 7], 1, 1.0)) == 2
    assert num_loss_tokens(OutcomeExample("o", [5, 6, 7], 1, 1.0, weight=0.0)) == 0


def test_an_all_masked_example_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    masked = [TokenExample("m", [5, 6, END], 1, [0.0, 0.0]), TokenExample("n", [5, 6, END], 3)]
    unread = StepExample("s", [5, 6, 7], [], [])
    with count_left_out() as counted:
        assert check_examples([masked[0], GOOD, masked[1]], "f.jsonl", LIMITS) == [GOOD]
    assert "f.jsonl: 2 of 3 examples have no token that the loss reads (all are masked)" in caplog.text
    assert "left out: 'm', 'n'" in caplog.text
    assert [(row.number, row.total) for row in counted] == [(2, 3)]
    with pytest.raises(BadInput, match=r"f.jsonl: all tokens of all 1 examples are masked"):
        check_examples([unread], "f.jsonl", LIMITS)


def test_a_truncated_answer_is_told(caplog: pytest.LogCaptureFixture) -> None:
    cut = TokenExample("c", [5, 6, 7], 1)
    assert len(check_examples([GOOD, cut], "f.jsonl", LIMITS)) == 2
    assert "f.jsonl: 1 of 2 responses do not end with an end token (id 1)" in caplog.text
    assert "'c'" in caplog.text


def test_a_pair_of_which_one_side_is_truncated_is_told(caplog: pytest.LogCaptureFixture) -> None:
    steps = PairExample("step", [5], [6, 7], [8, 9])  # two steps of a solution: neither ends
    check_examples([steps], "f.jsonl", LIMITS)
    assert caplog.text == ""
    check_examples([steps, PairExample("odd", [5], [6, END], [8, 9])], "f.jsonl", LIMITS)
    assert "of 1 of 2 pairs only one side ends with an end token (id 1)" in caplog.text
    assert "'odd'" in caplog.text


def test_a_prompt_longer_than_the_window_is_told_with_its_length(caplog: pytest.LogCaptureFixture) -> None:
    long = [TokenExample("long", [5] * 9, 2), TokenExample("hopeless", [5] * 12, 10)]
    assert keep_short([GOOD, *long], 8, "f.jsonl") == [GOOD]
    assert (
        "f.jsonl: 2 of 3 examples are longer than 8 tokens and are left out (1 by their prompt alone): the longest is "
        "'hopeless' with 12" in caplog.text
    )


def test_an_example_longer_than_the_models_positions_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BadInput) as error:
        check_examples([GOOD, TokenExample("long", [5] * 9, 2)], "f.jsonl", LIMITS, 512)
    assert str(error.value) == (
        "f.jsonl: 1 of 2 examples are longer than the 8 positions of policy: 'long' has 9 tokens: set "
        "examples.max_length=8"
    )
    check_examples([GOOD], "f.jsonl", LIMITS, 512)
    assert "max_length 512 is above the 8 positions of policy; the longest example has 4 tokens" in caplog.text


@pytest.mark.parametrize("token", [100, 4711, -1])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(BadInput) as error:
        check_examples([GOOD, PairExample("p", [5], [6], [7, token])], "f.jsonl", LIMITS)
    assert str(error.value) == (
        f"f.jsonl: 1 of 2 examples hold ids that policy has no embedding for (it has 100): id {token} is token 2 of "
        "'p': sample and train with one tokenizer"
    )


def test_two_examples_of_one_id_are_refused() -> None:
    with pytest.raises(BadInput, match=r"f.jsonl: 1 ids stand at several of 3 examples: 'a': ids must be unique"):
        check_examples([GOOD, GOOD, TokenExample("b", [5, END], 1)], "f.jsonl", LIMITS)


def test_evaluation_examples_that_are_trained_on_are_told(caplog: pytest.LogCaptureFixture) -> None:
    renamed = TokenExample("z", GOOD.ids, 2)
    check_held_out([GOOD], [renamed, TokenExample("b", [5, 9, END], 1)], "eval.jsonl")
    assert "eval.jsonl: 1 of 2 evaluation examples are trained on too: 'z'" in caplog.text


def test_a_batch_of_more_examples_than_there_are_is_told(caplog: pytest.LogCaptureFixture) -> None:
    check_amount([GOOD] * 8, 8)
    assert caplog.text == ""
    check_amount([GOOD] * 7, 8)
    assert "batch_size 8 is more than the 7 examples" in caplog.text


def test_evaluations_without_examples_are_told(caplog: pytest.LogCaptureFixture) -> None:
    check_evaluations(0, [])
    check_evaluations(400, [GOOD])
    assert caplog.text == ""
    check_evaluations(400, [])
    assert "evaluation.every=400 evaluates nothing, as there are no eval_examples" in caplog.text


@pytest.fixture
def copied(tiny_policy: Path, tmp_path: Path) -> Path:
    """A copy of the tiny policy to spoil."""
    return Path(shutil.copytree(tiny_policy, tmp_path / "policy"))


def test_the_limits_of_a_model_are_those_of_its_configuration(copied: Path) -> None:
    tokenizer = load_tokenizer(str(copied))
    limits = model_limits(str(copied), tokenizer)
    assert (limits.vocabulary, limits.positions) == (len(tokenizer), 512)
    assert limits.ends == {tokenizer.eos_token_id}
    check_tokenizer(tokenizer, limits)
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_end_ids(str(copied)) == [7, 9]
    assert model_limits(str(copied), tokenizer).ends == {7, 9, tokenizer.eos_token_id}


def test_a_tokenizer_larger_than_the_embeddings_is_refused(copied: Path) -> None:
    tokenizer: Any = load_tokenizer(str(copied))
    limits = model_limits(str(copied), tokenizer)
    size = len(tokenizer)
    tokenizer.add_tokens(["<one>", "<two>"])
    with pytest.raises(BadInput) as error:
        check_tokenizer(tokenizer, limits)
    assert f"its tokenizer has {size + 2} tokens, its model {size} embeddings: the last 2 cannot be" in str(error.value)


def word_tokenizer(folder: Path, **special: str) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_and_says_so(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    word_tokenizer(copied, eos_token="</s>")
    assert load_tokenizer(str(copied)).pad_token_id == 2
    assert "has no pad token: its end token </s> (id 2) pads, always masked" in caplog.text


def test_a_tokenizer_with_neither_pad_nor_end_token_is_refused(copied: Path) -> None:
    word_tokenizer(copied)
    with pytest.raises(BadModel, match=r"its tokenizer \(3 tokens\) has neither a pad token nor an end token"):
        load_tokenizer(str(copied))


def test_a_tokenizer_without_an_end_token_cannot_train(copied: Path) -> None:
    word_tokenizer(copied, pad_token="b")
    tokenizer = load_tokenizer(str(copied))
    with pytest.raises(BadInput, match="the tokenizer's eos token is not set: set eos_token in its tokenizer_config"):
        check_tokenizer(tokenizer, model_limits(str(copied), tokenizer))


CHAT = "{% for m in messages %}<|user|>{{ m['content'] }}<|turn|>{% endfor %}"


def words(template: str = "", end: str = "<|end|>", **more: int) -> PreTrainedTokenizerFast:
    """A tokenizer of a few words; `more` are others with their ids."""
    names = {"<|pad|>": 0, "<|end|>": 1, "<|user|>": 2, "<|turn|>": 3, "?": 4, **more}
    found = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(names, unk_token="?")), eos_token=end, unk_token="?"
    )
    found.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|turn|>"]})
    found.chat_template = template or None
    return found


@pytest.mark.parametrize(
    ("template", "config", "generation", "faults"),
    [
        ("", [1], [1], []),
        ("", [1], [], []),  # no generation_config.json: engines read config.json
        ("", [2], [1], ["id 1, config.json ends at 2", "config.json ends at 2, generation_config.json, which engines"]),
        ("", [1], [2, 3], ["id 1, generation_config.json ends at 2, 3", "config.json ends at 1, generation_config"]),
        (CHAT, [1], [1, 3], []),
        (CHAT, [1], [1], ["the chat template ends a turn with '<|turn|>' (id 3), a response ends at 1"]),
        ("{{ messages[-1]['content'] }}", [1], [1], ["the chat template ends a turn without a token"]),
        ("{{ raise_exception('no') }}", [1], [1], []),
    ],
)
def test_whatever_names_the_end_of_a_response_names_the_same(
    template: str, config: list[int], generation: list[int], faults: list[str]
) -> None:
    found = stop_token_faults(words(template), config, generation)
    assert len(found) == len(faults)
    assert all(part in line for part, line in zip(faults, found, strict=True))


def test_the_ends_of_a_folder_are_compared_before_training(
    tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(str(tiny_policy))
    check_stop_tokens(tokenizer, str(tiny_policy))
    assert caplog.text == ""
    shutil.copytree(tiny_policy, tmp_path / "other")
    (tmp_path / "other" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    check_stop_tokens(tokenizer, str(tmp_path / "other"))
    assert "the tokenizer's end token '<|end|>' is id 1, generation_config.json ends at 7, 9" in caplog.text


def test_tokenizers_differ_in_ids_in_texts_or_in_the_ids_of_tokens() -> None:
    def found(one: Any, other: Any, texts: tuple[str, ...] = ("a", "b")) -> list[str]:
        return tokenizer_differences(one, other, ("the policy", "the judge"), texts)

    base = words(a=5, b=6)
    assert found(base, words(a=5, b=6)) == found(base, words(a=5, b=6, c=7)) == []
    swapped = found(base, words(a=6, b=5))
    assert swapped[0] == "of 'a' the policy makes 1 tokens, from token 0 on [5], the judge 1, [6]"
    assert swapped[-1] == "2 tokens have other ids: 'a' is 5 of the policy, 6 of the judge"
    special = words(a=5, b=6)
    special.add_special_tokens({"additional_special_tokens": ["a"]})
    assert found(base, special) == ["the policy reads the same tokens as 'a', the judge as ''"]


def test_a_judge_with_another_tokenizer_is_refused_by_reinforcement_learning(
    tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from espalier.models.tiny import build_tokenizer
    from espalier.models.tokenizer_checks import check_same_tokenizer

    tokenizer = load_tokenizer(str(tiny_policy))
    check_same_tokenizer(tokenizer, str(tiny_policy), "process reward model")
    shutil.copytree(tiny_policy, tmp_path / "prm")
    build_tokenizer(["zzz yyy zzz yyy xxx"], len(tokenizer)).save_pretrained(tmp_path / "prm")
    with pytest.raises(BadInput, match="the process reward model has another tokenizer than the policy: of 'Mia has"):
        check_same_tokenizer(tokenizer, str(tmp_path / "prm"), "process reward model")
    for file in (tmp_path / "prm").glob("tokenizer*"):
        file.unlink()
    assert caplog.text == ""
    check_same_tokenizer(tokenizer, str(tmp_path / "prm"), "process reward model")
    assert "is taken on trust" in caplog.text


def test_a_rate_that_trains_nothing_names_the_sizes_that_bring_one() -> None:
    check_rate(1e-7)
    for rate in (0.0, -1e-5, float("nan")):
        with pytest.raises(BadInput, match=r"update\.learning_rate is .*: choose the size of the model, as size="):
            check_rate(rate)
