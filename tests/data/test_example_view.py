"""An example as a person reads it: masks, weights and targets at their tokens, in brackets and in colour."""

from typing import Any

from espalier.data.examples.example_view import of_each_kind, token_text, view
from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample, TokenExample

WORDS = ["</s>", "What", " is", " 2?", " 2", " it", " is", ".\n"]
TOKENS = TokenExample("t", [1, 2, 3, 4, 5, 0], 3)
STEPS = StepExample("s", [1, 2, 3, 4, 5, 6, 0], [4, 6], [0.875, 1.0])
OUTCOME = OutcomeExample("o", [1, 2, 3, 4, 0], 3, 0.5)
PAIR = PairExample("p", [1, 2], [4, 0], [5, 7, 0], margin=0.25)


def piece(token: int) -> str:
    return WORDS[token]


def test_the_response_of_a_token_example_stands_in_brackets() -> None:
    assert view(TOKENS, piece, False) == (
        "token example 't': 6 tokens, the loss reads 3\nWhat is 2?[[ 2 it</s>]]"
    )  # fmt: skip


def test_weights_stand_behind_their_tokens_and_a_masked_token_is_outside() -> None:
    example = TokenExample("t", [1, 2, 3, 4, 5, 0], 2, [0.5, 0.0, -1.0, -1.0])
    text = "What is[[ 2?]] x0.5  2[[ it</s>]] x-1 "
    assert view(example, piece, False) == f"token example 't': 6 tokens, the loss reads 3\n{text}"


def test_the_targets_of_a_step_example_stand_at_its_step_ends() -> None:
    text = "What is 2? 2 it<step 1: 0.875> is</s><step 2: 1>"
    assert view(STEPS, piece, False) == f"step example 's': 7 tokens, the head is read at 2\n{text}"
    weighed = StepExample("s", [1, 7, 0], [1], [0.0], [2.0])
    assert view(weighed, piece, False).splitlines()[1:] == ["What.⏎", "<step 1: 0 x2></s>"]


def test_an_outcome_stands_at_the_last_token() -> None:
    assert view(OUTCOME, piece, False).splitlines()[1] == "What is 2?[[ 2]][[</s>]]<outcome: 0.5>"
    lent = OutcomeExample("o", [1, 4], 1, 1.0, 3.0, [5, 0])
    assert view(lent, piece, False).splitlines()[1:] == [
        "What[[ 2]]<outcome: 1 x3>", "with a response to another prompt, 2 tokens:", " it</s>",
    ]  # fmt: skip


def test_both_sides_of_a_pair_stand_below_their_prompt() -> None:
    assert view(PAIR, piece, False).split("\n") == [
        "pair example 'p': 2 tokens of prompt, margin 0.25", "What is",
        "chosen, the loss reads 2 tokens:", "[[ 2</s>]]",
        "rejected, the loss reads 3 tokens:", "[[ it.⏎", "</s>]]",
    ]  # fmt: skip


def test_on_a_terminal_the_mask_is_a_colour() -> None:
    shown = view(TokenExample("t", [1, 2, 4, 0], 2, [1.0, -2.0]), piece, True).split("\n")[1]
    assert shown == "\x1b[2mWhat is\x1b[0m\x1b[32m 2\x1b[0m\x1b[31m</s> x-2 \x1b[0m"
    assert "\x1b[1;35m<step 1: 0.875>\x1b[0m" in view(STEPS, piece, True)


def test_one_example_of_each_kind_is_shown_and_one_that_is_weighed() -> None:
    weighed = TokenExample("w", [1, 4], 1, [0.5])
    others = [TokenExample("u", [1, 4], 1), OUTCOME, STEPS, PAIR, weighed]
    assert of_each_kind([TOKENS, *others]) == [TOKENS, OUTCOME, STEPS, PAIR, weighed]


def test_tokens_of_a_real_tokenizer_join_to_their_text(tokenizer: Any) -> None:
    ids = tokenizer("Sam has 12 apples.\n").input_ids
    shown = token_text(tokenizer)
    assert "".join(map(shown, ids)) == tokenizer.decode(ids)
    assert shown(tokenizer.eos_token_id) == tokenizer.eos_token
    torn = tokenizer("é").input_ids
    assert "\ufffd" not in "".join(map(shown, torn)), "bytes of one character have names"
