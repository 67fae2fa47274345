"""p(Yes) against a float64 softmax over whole logits, and verdicts under published tokenizers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.silence.real_tokenizers import build
from espalier.data.records import BadInput
from espalier.data.steps import Decoder
from espalier.data.token_text import added_text
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.tiny import build_tiny
from espalier.models.verdict_probs import VerdictTokens, YesProb, spelling_tokens, yes_probs
from tests.support.slow import slow_unless

QUESTION = "Is the solution right (Yes/No)?"
YES, NO = [" Yes", "Yes"], [" No", "No"]


NAMES = ["sentencepiece", "sentencepiece_first", "tekken", "tiny"]


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("sentencepiece_first", "tiny"), NAMES))
def test_every_spelling_has_tokens_of_its_own_that_read_as_it(name: str, tmp_path: Path) -> None:
    tokenizer = build(name, tmp_path / name, num_ranks=40_000).tokenizer
    found = VerdictTokens.of(tokenizer, QUESTION, YES, NO)
    context = list(tokenizer(QUESTION).input_ids)
    decode = Decoder(tokenizer, skips_special_tokens=False)
    assert [added_text(context, row, decode) for row in found.yes] == YES
    assert [added_text(context, row, decode) for row in found.no] == NO
    if name != "tiny":  # published ones have each as one token
        assert {len(row) for row in [*found.yes, *found.no]} == {1}
        assert len({*found.yes, *found.no}) == 4
    else:  # trained on other texts, it spells them
        assert max(map(len, found.yes)) > 1


def test_a_spelling_that_goes_on_from_another_one_is_counted_once(tmp_path: Path) -> None:
    tokenizer = build("sentencepiece_first", tmp_path / "t").tokenizer
    plain = spelling_tokens(tokenizer, QUESTION, ["Yes"])
    assert spelling_tokens(tokenizer, QUESTION, ["Yes", "Yes", "Yes!!"]) == plain


def test_two_verdicts_of_the_same_tokens_are_refused(tmp_path: Path) -> None:
    tokenizer = build("sentencepiece_first", tmp_path / "t").tokenizer
    with pytest.raises(BadInput, match="are the same tokens"):
        VerdictTokens.of(tokenizer, QUESTION, ["Yes"], ["Yes, no"])


def test_a_verdict_that_begins_within_a_token_is_refused(tmp_path: Path) -> None:
    """Tekken writes ( + right, but (w + rong: behind a lone ( the model would always mean that it is right."""
    tokenizer = build("tekken", tmp_path / "t", num_ranks=40_000).tokenizer
    assert [tokenizer.tokenize(text)[0] for text in ("(right", "(wrong")] == ["(", "(w"]
    with pytest.raises(BadInput, match=r"joins the end of '\(' and the beginning of 'wrong' in one token"):
        VerdictTokens.of(tokenizer, "(", ["right"], ["wrong"])
    with pytest.raises(BadInput, match="joins the end of 'Verdict: ' and the beginning of 'good'"):
        VerdictTokens.of(tokenizer, "Verdict: ", ["good"], ["bad"])
    VerdictTokens.of(tokenizer, "\\boxed{", ["correct"], ["incorrect"])
    VerdictTokens.of(tokenizer, "Verdict:", [" good", "good"], [" bad", "bad"])


def test_the_share_of_yes_by_hand() -> None:
    logs = [math.log(p) for p in (0.3, 0.1)], [math.log(p) for p in (0.1,)]
    assert YesProb.of(*logs) == YesProb(pytest.approx(0.8), pytest.approx(0.5))
    assert YesProb.of([-2000.0], [-2000.0 + math.log(3)]) == YesProb(pytest.approx(0.25), 0.0)  # no underflow
    assert YesProb.of([-5.0], [-5000.0]).share == 1.0


def brute_force(model: Any, tokenizer: Any, text: str, verdicts: VerdictTokens) -> list[float]:
    """p_yes / (p_yes + p_no) and p_yes + p_no, every spelling a pass of its own, the softmax in float64."""
    before = list(tokenizer(text).input_ids)
    sides = []
    for side in (verdicts.yes, verdicts.no):
        total = 0.0
        for tokens in side:
            logits = model(input_ids=torch.tensor([[*before, *tokens]])).logits[0].double()
            probs = torch.softmax(logits, dim=-1)
            total += math.prod(float(probs[len(before) - 1 + k, token]) for k, token in enumerate(tokens))
        sides.append(total)
    return [sides[0] / sum(sides), sum(sides)]


@pytest.mark.parametrize("knows_the_words", [True, False])
def test_yes_probs_equal_the_softmax_over_all_tokens(knows_the_words: bool, tmp_path: Path) -> None:
    texts = ["Mia has 3 pens.\n#### 3\n"] * 3
    texts += [f"{QUESTION} Yes", f"{QUESTION} No", "Yes", "No"] * 3 * knows_the_words
    size: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 330, "max_length": 128}
    folder = str(build_tiny(tmp_path / "m", texts, **size, seed=1))
    model, tokenizer = load_policy(folder, attention="eager").eval(), load_tokenizer(folder)
    verdicts = VerdictTokens.of(tokenizer, QUESTION, YES, NO)
    asked = [f"Mia has {n} pens.\n#### {n}\n{QUESTION}" for n in (3, 4, 3, 17)]
    with torch.inference_mode():
        expected = [brute_force(model, tokenizer, text, verdicts) for text in asked]
    done: list[int] = []
    found = yes_probs(model, tokenizer, asked, verdicts, batch_tokens=200, on_progress=done.append)
    for one, (share, mass) in zip(found, expected, strict=True):
        assert one.share == pytest.approx(share, abs=1e-5)
        assert one.mass == pytest.approx(mass, rel=1e-4)
    assert found[0] == found[2]
    assert done[-1] == 3  # distinct ones
    with pytest.raises(BadInput, match="text 0"):
        yes_probs(model, tokenizer, ["pens " * 200], verdicts)
