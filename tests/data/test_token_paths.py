"""From tokens to text on published tokenizers: SentencePiece, byte-level BPE with 131k tokens, and the tiny one.

`benchmarks.silence.token_paths` sends random texts through every path; here are a few of them, and the cases that
once differed written out.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.silence.real_tokenizers import NAMES, Subject, build
from espalier.data.answers.grade import Grade
from espalier.data.records import AnnotatedSolution, BadInput, Problem, State, Trajectory
from espalier.data.splitters import splitter
from espalier.data.steps import Decoder
from espalier.sampling.client import SampleRequest, SamplingParams
from espalier.sampling.completion_api import parse_samples
from espalier.sampling.requests import make_completions, make_trajectory
from espalier.values.cut_points import split_at_cut_points
from espalier.values.monte_carlo import finished, states_of
from tests.support.slow import slow_unless

PROBLEM = Problem("p", "", "6")


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    """All tokenizers; of the largest the first 16k tokens, which is the same and faster."""
    pytest.importorskip("mistral_common", reason="the published tokenizers lie in the package mistral_common")
    pytest.importorskip("sentencepiece", reason="one of them is read with the package sentencepiece")
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    return {name: build(name, folder / name, 16000) for name in NAMES}


class Sums:
    """A task whose answer is the number at the end of all it reads."""

    name = "sums"

    def __init__(self, splitter_name: str = "lines"):
        self.split_steps = splitter(splitter_name)
        self.read: list[str] = []

    def grade(self, gold: Any, response: str, num_options: int = 0) -> Grade:
        self.read.append(response)
        return Grade(response, response.split()[-1:] == [gold])


def sampled(
    subject: Subject, task: Any, prompt: str, ids: list[int], text: str, reason: str, stop: Any = None
) -> Trajectory:
    """A trajectory from what vLLM answers; every token has the log-prob -1."""
    request = SampleRequest("p", prompt, list(subject.tokenizer(prompt).input_ids))
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": reason, "stop_reason": stop,
              "logprobs": {"token_logprobs": [-1.0] * len(ids)}}  # fmt: skip
    params = SamplingParams(1, 1.0, 64, return_logprobs=True)
    (sample,) = parse_samples("completions", {"choices": [choice]}, request, params)
    return make_trajectory(task, subject.tokenizer, PROBLEM, request, 0, sample)


def tokens(subject: Subject, *pieces: str) -> list[int]:
    """The ids of pieces that are each one token: `▁5`, `<0x0A>` or `5`, as the vocabulary writes them."""
    ids: list[int] = subject.tokenizer.convert_tokens_to_ids(list(pieces))
    assert subject.tokenizer.unk_token_id not in ids
    return ids


@pytest.mark.parametrize("name", slow_unless(lambda name: name != "sentencepiece", NAMES))
def test_random_texts_and_cuts_read_as_their_bytes_on_every_path(name: str, subjects: dict[str, Subject]) -> None:
    from benchmarks.silence.token_paths import PATHS, count

    rows = count(subjects[name], num_texts=20, seed=0)
    assert [(row.path, row.differences, row.first) for row in rows] == [(path, 0, "") for path in PATHS]
    assert sum(row.cuts for row in rows) > 500


def test_segments_of_a_response_whose_last_token_holds_the_beginning_of_a_stop_string(
    subjects: dict[str, Subject],
) -> None:
    tekken = subjects["tekken"]
    ids = tokens(tekken, "2", "+", "4", "=", "6", ".ĊĊ", "Q")  # the stop string "\n\nQ" begins within `.\n\n`
    row = sampled(tekken, Sums(), "1+1\n", ids, "2+4=6.", "stop", "\n\nQ")
    assert (row.response, row.response_ids, row.logprobs) == ("2+4=6.", ids[:6], [-1.0] * 6)
    cut = split_at_cut_points(row, [-0.01, -1.0, -0.01, -1.0, -0.01, -0.01], Decoder(tekken.tokenizer))
    assert (cut.steps, cut.step_ends) == (["2+", "4=", "6."], [2, 4, 6])


def test_a_response_of_nothing_but_a_stop_string_keeps_the_token_that_is_rewarded(subjects: dict[str, Subject]) -> None:
    tekken = subjects["tekken"]
    row = sampled(tekken, Sums(), "1+1\n", tokens(tekken, "##", "##"), "", "stop", "####")
    assert (row.response, row.steps, row.step_ends, row.response_ids) == ("", [], [], tokens(tekken, "##"))
    assert row.logprobs == [-1.0]


def test_a_sampler_that_reads_its_tokens_otherwise_is_refused(subjects: dict[str, Subject]) -> None:
    tekken = subjects["tekken"]
    ids = [*tokens(tekken, "6", ".ĊĊ", "6"), tekken.tokenizer.eos_token_id]
    with pytest.raises(BadInput, match=r"reads its tokens as '6.\\n\\n7', the policy's tokenizer as '6.\\n\\n6'"):
        sampled(tekken, Sums(), "1+1\n", ids, "6.\n\n7", "stop")


def test_a_character_that_the_length_cut_off_is_no_part_of_the_text(subjects: dict[str, Subject]) -> None:
    pieces = subjects["sentencepiece"]
    ids = tokens(pieces, "▁", "6", "<0x0A>", "<0xF0>", "<0x9F>")  # behind the newline two of the four bytes of an emoji
    row = sampled(pieces, Sums(), "Q:", ids, " 6\n", "length")
    assert (row.response, row.steps, row.step_ends) == (" 6\n", [" 6\n"], [5])


def test_a_stop_string_is_found_in_a_response_that_begins_with_a_space(subjects: dict[str, Subject]) -> None:
    pieces = subjects["sentencepiece"]
    ids = tokens(pieces, "▁answer", "▁", "6", "<0x0A>", "<0x0A>", "Q")
    row = sampled(pieces, Sums(), "Q:", ids, " answer 6", "stop", "\n\n")
    assert (row.response, row.response_ids, row.logprobs) == (" answer 6", ids[:3], [-1.0] * 3)
    assert row.step_ends == [3]


def test_a_token_over_a_step_border_and_its_text_are_of_one_step(subjects: dict[str, Subject]) -> None:
    tekken = subjects["tekken"]
    ids = [*tokens(tekken, "5", ".ĊĊ", "6"), tekken.tokenizer.eos_token_id]
    row = sampled(tekken, Sums("gsm8k"), "1+1\n", ids, "5.\n\n6", "stop")  # the splitter says "5.", "\n", "\n6"
    assert (row.steps, row.step_ends) == (["5.\n\n", "6"], [2, 4])
    (state,) = states_of(row)
    assert (state.prefix, state.prefix_ids) == ("5.\n\n", ids[:2])


@pytest.mark.parametrize("prefix", ["5.\n\n", "5."])  # as states are cut, and one whose text ends within the token
def test_a_completion_is_graded_on_the_text_of_all_its_tokens(prefix: str, subjects: dict[str, Subject]) -> None:
    tekken, task = subjects["tekken"], Sums("gsm8k")
    ids, six = tokens(tekken, "5", ".ĊĊ"), [*tokens(tekken, "6"), tekken.tokenizer.eos_token_id]
    prompt_ids = list(tekken.tokenizer("1+1\n").input_ids)
    state = State("p/0#1", "p", "p/0", 1, "1+1\n", prefix, prompt_ids, ids, "6")
    request = SampleRequest("p/0#1", "1+1\n" + prefix, prompt_ids + ids)
    choice = {"index": 0, "text": "6", "token_ids": six, "finish_reason": "stop", "stop_reason": None}
    (sample,) = parse_samples("completions", {"choices": [choice]}, request, SamplingParams(1, 1.0, 64))
    (completion,) = make_completions(task, tekken.tokenizer, state, request.id, [sample])
    assert (task.read, completion.is_correct) == (["5.\n\n6"], True)
    assert state.prefix + completion.response == finished(state, completion).response == "5.\n\n6"


def test_a_demonstration_gets_no_space_that_it_does_not_have(subjects: dict[str, Subject]) -> None:
    from espalier.data.examples.token_examples import encode_demonstration
    from espalier.data.records import Demonstration

    for name in ("sentencepiece", "sentencepiece_first"):
        tokenizer = subjects[name].tokenizer
        for completion, piece in ((" 6", "▁6"), ("6", "6")):
            example = encode_demonstration(tokenizer, Demonstration("d", "1 + 5 =", completion))
            written = tokenizer.convert_ids_to_tokens(example.ids[example.prompt_length :])
            assert written == (["▁", "6", "</s>"] if piece == "▁6" else ["6", "</s>"])


def test_judged_steps_of_a_tokenizer_that_writes_a_space_first_are_kept(subjects: dict[str, Subject]) -> None:
    from espalier.data.examples.step_examples import encode_labelled
    from espalier.data.prompts import PromptTemplate

    tokenizer = subjects["sentencepiece"].tokenizer
    record = AnnotatedSolution("p", "p", "1 + 5?", ["One.\n", "Six."], [1.0, 0.0], 1, None)
    example = encode_labelled(tokenizer, record, PromptTemplate(), "x")
    assert example is not None
    assert [tokenizer.convert_ids_to_tokens(example.ids[place]) for place in example.positions] == ["<0x0A>", "."]


def test_a_decoder_that_asks_the_rust_part_reads_as_the_tokenizer_does(subjects: dict[str, Subject]) -> None:
    """Tokens alone and ten together, with special tokens and without."""
    num_plain = 0
    for subject in subjects.values():
        for skips in (True, False):
            decode = Decoder(subject.tokenizer, skips)
            num_plain += decode._is_plain
            for ids in [[token] for token in range(600)] + [list(range(start, start + 10)) for start in range(500)]:
                settings = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
                assert decode(ids) == decode(ids) == subject.tokenizer.decode(ids, **settings)
    assert num_plain >= 4


def test_a_tokenizer_with_a_way_of_its_own_is_asked_itself() -> None:
    class Own:
        def decode(self, ids: Any, **settings: Any) -> str:
            return f"{list(ids)} {settings}"

    assert Decoder(Own())([1]) == "[1] {'skip_special_tokens': True, 'clean_up_tokenization_spaces': False}"


def test_a_decoder_remembers_so_many_tokens_and_no_more() -> None:
    class Own:
        def decode(self, ids: Any, **settings: Any) -> str:
            return str(ids[0])

    decode = Decoder(Own())
    for number in range(40):
        assert decode([number] * 10_000) == str(number)
        assert sum(map(len, decode._recent)) <= 110_000
