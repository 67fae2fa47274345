"""Published layouts of right and wrong responses, and which of them a model was trained on."""

import json
import os
from pathlib import Path

import pytest

from espalier.data.ranked_responses import RankedResponses, SameResponses, read_ranked
from espalier.data.records import BadInput
from espalier.data.seen_responses import read_training_responses, response_hash, seen_rows, write_training_responses
from espalier.data.sources import Row, read_json_rows

LONG = "one two three four five six seven eight nine ten " * 2


def read(layout: str, **fields: object) -> RankedResponses:
    return read_ranked(Row("f.json", 3, fields), layout)


def test_llmbar_labels_are_one_and_two() -> None:
    row = {"input": "Q", "output_1": "first", "output_2": "second"}
    assert read("llmbar", **row, label=1).chosen == ["first"]
    assert read("llmbar", **row, label=2).chosen == ["second"]
    for label in (0, 3):
        with pytest.raises(BadInput, match=r"f.json:3: label must be 1 or 2, the number of the better output, got"):
            read("llmbar", **row, label=label)


def test_reward_bench_names_a_row_by_subset_and_id() -> None:
    row = read("reward_bench", prompt="Q", chosen="good", rejected="bad", subset="hep-go", id=7, chosen_model="m")
    assert row == RankedResponses("hep-go/7", "hep-go", "Q", ["good"], ["bad"])


def test_a_prompt_of_messages_is_their_text() -> None:
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}]
    row = read("pairs", chosen=turns, rejected=[turns[0], {"role": "assistant", "content": "bad"}])
    assert (row.prompt, row.chosen, row.rejected) == ("Q", ["good"], ["bad"])
    with pytest.raises(BadInput, match="must end with a message of the assistant"):
        read("pairs", chosen=turns[:1], rejected=turns)


def test_texts_that_begin_alike_hold_their_prompt() -> None:
    row = read("pairs", chosen="Human: Q Assistant: good", rejected="Human: Q Assistant: bad")
    assert (row.prompt, row.chosen, row.rejected) == ("Human: Q Assistant:", [" good"], [" bad"])
    row = read("pairs", chosen="Q\n\nAssistant: I think so.", rejected="Q\n\nAssistant: I know.")
    assert (row.prompt + row.chosen[0], row.prompt + row.rejected[0]) == (
        "Q\n\nAssistant: I think so.", "Q\n\nAssistant: I know."), "nothing is lost where they part"  # fmt: skip
    with pytest.raises(BadInput, match=r"f\.json:3: there is no prompt: .* that begin alike"):
        read("pairs", chosen="yes", rejected="no")
    with pytest.raises(BadInput, match=r"f\.json:3: .* is their prompt, and behind it one of them has no response"):
        read("pairs", chosen="How many? 2", rejected="How many? 2 or 3")


def test_a_response_on_both_sides_is_told_from_a_row_that_cannot_be_read() -> None:
    turn = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": " 4\n"}]
    for fields in ({"prompt": "Q", "chosen": "4", "rejected": "4 "}, {"chosen": "Q: 4", "rejected": "Q: 4"},
                   {"chosen": turn, "rejected": turn}):  # fmt: skip
        with pytest.raises(SameResponses):
            read("pairs", **fields)
    with pytest.raises(SameResponses):
        read("rm_bench", prompt="Q", chosen=["a", "b", "c"], rejected=["d", "b", "e"], domain="math")


def test_texts_of_pairs_stay_as_they_are_written() -> None:
    row = read("pairs", prompt="Q\n", chosen=" 4", rejected=" 5\n")
    assert (row.prompt, row.chosen, row.rejected) == ("Q\n", [" 4"], [" 5\n"])
    asked = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Q"}]
    row = read("pairs", prompt=asked, chosen=" 4", rejected=" 5")
    assert (row.prompt, row.turns) == ("system: Be brief.\n\nuser: Q", asked)
    with pytest.raises(BadInput, match="rejected is empty"):
        read("pairs", prompt="Q", chosen="4", rejected=" ")


def test_turns_of_the_assistant_alone_hold_no_prompt() -> None:
    """What the answers begin with alike is none: they are cut there only where they are texts."""
    chosen, rejected = ([{"role": "assistant", "content": f"It is {word}."}] for word in ("five", "six"))
    with pytest.raises(BadInput, match="there is no prompt"):
        read("pairs", chosen=chosen, rejected=rejected)


def test_conversations_that_part_before_the_last_turn_are_refused() -> None:
    sides = [[{"role": "user", "content": asked}, {"role": "assistant", "content": "a"}] for asked in "QR"]
    with pytest.raises(BadInput, match="chosen and rejected part before their last turn"):
        read("pairs", chosen=sides[0], rejected=sides[1])


def test_rm_bench_has_three_styles_a_side() -> None:
    row = {"prompt": "Q", "rejected": ["d", "e", "f"], "domain": "math", "id": 1}
    assert read("rm_bench", **row, chosen=["a", "b", "c"]).subset == "math"
    with pytest.raises(BadInput, match="three styles each, got 2 and 3"):
        read("rm_bench", **row, chosen=["a", "b"])


def test_a_row_is_seen_by_both_sides_or_by_a_long_one() -> None:
    short = RankedResponses("a", "", "Q", ["I cannot help with that."], ["Sure!"])
    long = RankedResponses("b", "", "Q", [LONG], ["no"])
    assert seen_rows([short, long], {response_hash("i  cannot help\nwith that.")}) == []
    assert seen_rows([short, long], {response_hash("I cannot help with that."), response_hash("sure!")}) == ["a"]
    assert seen_rows([short, long], {response_hash(LONG.upper())}) == ["b"]


def test_a_response_without_spaces_between_words_is_long_by_its_characters() -> None:
    thought = "首先我们计算七乘以八等于五十六，" * 5
    rows = [
        RankedResponses("a", "", "Q", [thought], ["不对"]),
        RankedResponses("b", "", "Q", ["好的，没有问题。"], ["不"]),
    ]
    assert seen_rows(rows, {response_hash(thought), response_hash("好的，没有问题。")}) == ["a"]


def test_what_a_model_started_from_was_trained_on_counts_too(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    write_training_responses(first, {"aa"}, "none")
    write_training_responses(second, {"bb"}, str(first))
    assert read_training_responses(str(second)) == {"aa", "bb"}
    assert read_training_responses(str(tmp_path)) is None


def test_a_model_of_a_reward_model_that_does_not_say_its_responses_does_not_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_training_responses(tmp_path, {"bb"}, "silent", must_say=True)
    assert read_training_responses(str(tmp_path)) is None
    assert "silent: a reward model or verifier that does not say what it was trained on, so neither does" in caplog.text


def test_the_published_llmbar_file_has_42_first_and_58_second_labels() -> None:
    path = Path(os.environ.get("ESPALIER_DATA", "../shared/datasets")) / "rewardbench_parts" / "llmbar_natural.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there: set ESPALIER_DATA to the folder of the published files")
    published = json.loads(path.read_text())
    rows = [read_ranked(row, "llmbar") for row in read_json_rows(path)]
    assert len(rows) == 100
    first = [row for row, one in zip(rows, published, strict=True) if row.chosen == [one["output_1"].strip()]]
    assert len(first) == 42


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "good"}], 3])
def test_a_message_without_a_text_is_no_text(content: object) -> None:
    """The word None would be scored, or a list as Python writes it."""
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}]
    with pytest.raises(BadInput, match="a message has no text as content"):
        read("pairs", prompt="Q", chosen=[{**turns[1], "content": content}], rejected=[{**turns[1], "content": "bad"}])
    with pytest.raises(BadInput, match="a message has no text as content"):
        read("pairs", prompt=[{**turns[0], "content": content}], chosen="good", rejected="bad")
