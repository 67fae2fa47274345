"""Published columns of pairs and conversations: what is the prompt, and which tokens are learnt, token for token."""

from typing import Any

import pytest

from benchmarks.silence.real_tokenizers import build
from espalier.data.conversations import ended_response, learnt_tokens, pair_tokens, response_tokens, split_prompt
from espalier.data.records import BadInput
from espalier.data.sources import BadRow, Row
from espalier.models.tiny import build_tokenizer

CHAT = (
    "{%- for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{%- for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = (  # leaves out what the assistant said before, as templates of reasoning models do with thoughts
    "{%- for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else '...' }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THOUGHTS = (  # DeepSeek-R1-Distill's, without its parts for tools
    "{% for m in messages %}{% set content = m['content'] %}{% if m['role'] == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OPENS_THOUGHTS = (  # Qwen3-Thinking's way: the prompt writes the first <think>
    "{% for m in messages %}{% set content = m['content'] %}{% if m['role'] == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 数学 twice?"},
    {"role": "assistant", "content": "10.\n\nThat is all."},
]


@pytest.fixture(scope="module", params=["tekken", "tiny"])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A published byte-level tokenizer and the tiny one, in the form of a chat model's."""
    if request.param == "tiny":
        made = build_tokenizer(["What is 2 + 3?\n5"], 300)
    else:
        pytest.importorskip("mistral_common", reason="the published tokenizer lies in the package mistral_common")
        made = build("tekken", tmp_path_factory.mktemp("tokenizer"), 8000).tokenizer
    made.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = CHAT
    return made


def row(**fields: Any) -> Row:
    return Row("pairs.jsonl", 3, fields)


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


def test_the_assistants_tokens_are_those_that_a_marked_template_gives(chat: Any) -> None:
    """The marks are what TRL trains on with assistant_only_loss; they are computed by transformers."""
    found = learnt_tokens(TURNS, chat)
    chat.chat_template = MARKED
    marked = chat.apply_chat_template(TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert learnt_tokens(TURNS, chat) == found
    chat.chat_template = CHAT
    assert found.ids == marked["input_ids"]
    assert [int(one) for one in found.is_learnt] == marked["assistant_masks"]
    learnt = [token for token, one in zip(found.ids, found.is_learnt, strict=True) if one]
    assert chat.decode(learnt) == "5<|im_end|>10.\n\nThat is all.<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused(chat: Any) -> None:
    chat.chat_template = FORGETS
    with pytest.raises(BadInput, match="writes turn 3 otherwise once the conversation goes on"):
        learnt_tokens(TURNS, chat)
    assert any(learnt_tokens(TURNS[:3], chat).is_learnt)
    chat.chat_template = CHAT
    with pytest.raises(BadRow, match="no turn of the assistant"):
        learnt_tokens(TURNS[:2], chat)


def thought(text: str, answer: str = "5") -> list[dict[str, str]]:
    return [{"role": "assistant", "content": f"<think> {text} </think>\n\n\n{answer}"}]


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_template_that_drops_the_thoughts_of_what_is_learnt_is_refused(is_marked: bool, chat: Any) -> None:
    """Else the model would learn to answer without them, and pairs of thoughts would be pairs of equal tokens."""
    chat.chat_template = FORGETS_THOUGHTS
    if is_marked:
        chat.chat_template = FORGETS_THOUGHTS.replace("content + '<|im_end|>' }}", "'' }}{% generation %}{{ content }}"
                                                      "<|im_end|>{% endgeneration %}")  # fmt: skip
    prompt, good = TURNS[:2], thought("2 and 3 make five.")
    with pytest.raises(BadRow, match="does not write all that the assistant says"):
        learnt_tokens([*prompt, *good], chat)
    with pytest.raises(BadRow, match="does not write all that the assistant says"):
        pair_tokens(row(prompt=prompt, chosen=good, rejected=thought("2 and 3 make six, or so.", "5!")), chat)
    with pytest.raises(BadRow, match="does not write all that the assistant says"):
        response_tokens(row(prompt=prompt, completion=good), chat)
    example = [*prompt, *good, TURNS[3], {"role": "assistant", "content": "10"}]
    assert any(learnt_tokens(example, chat, num_asked=4).is_learnt), "what only the prompt holds is not learnt"


def test_of_a_marked_template_the_last_turn_is_learnt_however_it_marks_the_others(chat: Any) -> None:
    """Each turn in two runs, or the last turn alone."""
    begins, mark, ends = "{% for m in messages %}{{ m['role'] + ': ' }}", "{% generation %}", "{% endgeneration %}"
    rest = "{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    written = f"{mark}{{{{ m['content'] + '<|im_end|>' }}}}{ends}"
    in_two = (
        f"{mark}{{{{ m['content'][:1] }}}}{ends}{{{{ '\n' }}}}{mark}{{{{ m['content'][1:] + '<|im_end|>' }}}}{ends}"
    )
    asked = {"role": "user", "content": "How much?"}
    one, two = ({"role": "assistant", "content": content} for content in ("one", "two"))
    for template in (
        f"{begins}{{% if m['role'] == 'assistant' %}}{in_two}{rest}",
        f"{begins}{{% if m['role'] == 'assistant' and loop.last %}}{written}{rest}",
    ):
        chat.chat_template = template
        found = learnt_tokens([asked, one, asked, two], chat, num_asked=3)
        ids = [token for token, is_learnt in zip(found.ids, found.is_learnt, strict=True) if is_learnt]
        assert chat.decode(ids).replace(" ", "") == "two<|im_end|>"


def test_thoughts_that_the_prompt_opens_are_learnt_whatever_their_white_space(chat: Any) -> None:
    chat.chat_template = OPENS_THOUGHTS
    prompt, good, bad = TURNS[:2], thought("2 and 3 make five."), thought("2 and 3 make six.")
    found = learnt_tokens([*prompt, *good], chat)
    learnt = chat.decode([token for token, one in zip(found.ids, found.is_learnt, strict=True) if one])
    assert learnt == "2 and 3 make five.\n</think>\n\n5<|im_end|>"
    assert chat.decode(response_tokens(row(prompt=prompt, completion=good), chat).response_ids) == learnt
    pair = pair_tokens(row(prompt=prompt, chosen=good, rejected=bad), chat)
    assert chat.decode(pair.rejected_ids) == learnt.replace("five", "six")


def test_two_turns_that_a_template_writes_alike_are_no_pair(chat: Any) -> None:
    chat.chat_template = CHAT.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    sides = [[{"role": "assistant", "content": text}] for text in ("5", "5\n")]
    with pytest.raises(BadRow, match="chosen and rejected are the same tokens"):
        pair_tokens(row(prompt=TURNS[:2], chosen=sides[0], rejected=sides[1]), chat)


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_only_what_follows_the_turns_that_are_asked_is_learnt(template: str, chat: Any) -> None:
    """A prompt may show answers of the assistant as examples."""
    chat.chat_template = template
    found = learnt_tokens(TURNS, chat, num_asked=4)
    learnt = [token for token, one in zip(found.ids, found.is_learnt, strict=True) if one]
    chat.chat_template = CHAT
    assert chat.decode(learnt) == "10.\n\nThat is all.<|im_end|>"


def test_a_template_that_writes_no_end_is_refused_and_an_end_that_is_written_is_not_doubled(chat: Any) -> None:
    chat.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}" \
                         "{% if add_generation_prompt %}assistant: {% endif %}"  # fmt: skip
    with pytest.raises(BadInput, match="writes no end token"):
        learnt_tokens(TURNS, chat)
    chat.chat_template = CHAT
    assert ended_response(chat, [5], " 5<|im_end|>") == ended_response(chat, [5], " 5")


def test_a_text_pair_with_its_prompt_ends_in_the_end_token(chat: Any) -> None:
    found = pair_tokens(row(prompt="2 + 3 =", chosen=" 5", rejected=" 6"), chat)
    assert (found.prompt, found.chosen, found.rejected) == ("2 + 3 =", " 5", " 6")
    assert chat.decode(found.chosen_ids) == " 5<|im_end|>"
    assert chat.decode(found.rejected_ids) == " 6<|im_end|>"
    assert found.prompt_ids == ids(chat, "2 + 3 =")


@pytest.mark.parametrize(
    ("chosen", "rejected", "parts"),
    [
        ("The sky is blue.", "The sky is green.", ("The sky is", " blue.", " green.")),
        ("ab", "abc", ("ab", "", "c")),
        ("xy", "zy", ("", "xy", "zy")),
    ],
)
def test_an_implicit_prompt_is_what_both_texts_begin_with(
    chosen: str, rejected: str, parts: tuple[str, str, str]
) -> None:
    assert split_prompt(chosen, rejected) == parts


@pytest.mark.parametrize(
    ("chosen", "rejected", "first"),
    [
        ("The sky is blueish today.", "The sky is bluest.", "The sky is"),  # they part within a word
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("So it is 数.", "So it is 敷.", "So it is"),  # whose bytes begin alike
    ],
)
def test_an_implicit_prompt_ends_between_tokens_of_both_whole_texts(
    chosen: str, rejected: str, first: str, chat: Any
) -> None:
    """Where texts part is no place at which anything is sampled: a word is not cut in two tokens there."""
    found = pair_tokens(row(chosen=chosen, rejected=rejected), chat)
    end = chat.eos_token_id
    assert found.prompt_ids + found.chosen_ids == [*ids(chat, chosen), end]
    assert found.prompt_ids + found.rejected_ids == [*ids(chat, rejected), end]
    assert (found.prompt + found.chosen, found.prompt + found.rejected) == (chosen, rejected)
    assert chat.decode(found.prompt_ids) == found.prompt
    assert found.prompt.startswith(first)


def test_two_texts_that_are_the_same_tokens_are_no_pair(chat: Any) -> None:
    """One has its end token written out: nothing tells them apart, and half of the pair would be learnt as wrong."""
    with pytest.raises(BadRow, match="chosen and rejected are the same tokens"):
        pair_tokens(row(chosen="So it is five ", rejected=f"So it is five {chat.eos_token}"), chat)


@pytest.mark.parametrize("has_prompt", ["turns", "text", "none"])
def test_a_pair_of_conversations_is_the_same_pair_in_every_layout(has_prompt: str, chat: Any) -> None:
    """Explicit turns; UltraFeedback's, whose prompt is a text; and none at all."""
    prompt, good, bad = TURNS[:2], [{"role": "assistant", "content": "5"}], [{"role": "assistant", "content": "6!"}]
    fields: dict[str, Any] = {"chosen": [*prompt, *good], "rejected": [*prompt, *bad], "score_chosen": 8.0}
    if has_prompt == "turns":
        fields = {"prompt": prompt, "chosen": good, "rejected": bad}
    elif has_prompt == "text":
        fields["prompt"] = "What is 2 + 3?"
    found = pair_tokens(row(**fields), chat)
    asked = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found.prompt == asked
    assert found.prompt_ids == ids(chat, asked)
    assert (found.chosen, found.rejected) == ("5<|im_end|>", "6!<|im_end|>")
    assert found.chosen_ids == ids(chat, "5<|im_end|>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": "xy", "rejected": "zy"}, "the pair has no prompt: chosen and rejected do not begin alike"),
        ({"prompt": "a", "chosen": "b"}, "rejected must be a text"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "the pair has no rejected"),
        ({"prompt": "no", "chosen": TURNS[:3], "rejected": [*TURNS[:2], {"role": "assistant", "content": "6"}]},
         "prompt is not what chosen and rejected begin with"),
        ({"chosen": [{"role": "user"}], "rejected": TURNS}, "turn 1 of chosen has no text as content"),
        ({"prompt": "Q: x", "chosen": "Q: x A: 1", "rejected": "Q: x A: 2"}, "repeat the prompt: leave prompt out"),
        ({"prompt": TURNS[:2], "chosen": TURNS[2:], "rejected": [{"role": "assistant", "content": "6"}]},
         "part before their last turn: what others say in them would be learnt"),
        ({"chosen": [{"role": "assistant", "content": "", "tool_calls": [1]}], "rejected": TURNS},
         "turn 1 of chosen has tool_calls, which is not read"),
        ({"chosen": [{"from": "human", "value": "x"}], "rejected": TURNS}, "turn 1 of chosen has no role"),
    ],
)  # fmt: skip
def test_a_row_without_a_pair_says_why(fields: dict[str, Any], message: str, chat: Any) -> None:
    with pytest.raises(BadRow, match=message):
        pair_tokens(row(**fields), chat)
