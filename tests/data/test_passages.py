"""Passages: how a source is cut, and BM25 against its formula, word for word in plain Python."""

import math
import random

import pytest

from espalier.data.passages import RankedPassages, cut_passages, words


def reference_scores(query: list[str], documents: list[list[str]], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """The equation as it is printed, one term after the other."""
    mean_length = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        terms = []
        for word in query:
            holding = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            number = document.count(word)
            terms.append(idf * number * (k1 + 1) / (number + k1 * (1 - b + b * len(document) / mean_length)))
        scores.append(math.fsum(terms))
    return scores


def test_bm25_is_its_formula() -> None:
    rng = random.Random(0)
    for _ in range(20):
        documents = [[rng.choice("abcdefgh") for _ in range(rng.randint(1, 30))] for _ in range(rng.randint(1, 12))]
        query = [rng.choice("abcdefghz") for _ in range(rng.randint(1, 8))]
        found = RankedPassages([" ".join(document) for document in documents]).scores(" ".join(query))
        assert found == pytest.approx(reference_scores(query, documents), rel=1e-12, abs=1e-12)


def test_bm25_by_hand() -> None:
    ranked = RankedPassages(["a b", "a a c d", "e f g"])  # mean length 3
    idf_a, idf_b = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    first = idf_a * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 2 / 3)) + idf_b * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 2 / 3))
    assert ranked.scores("B, a!") == pytest.approx([first, idf_a * 2 * 2.5 / (2 + 1.5 * (0.25 + 0.75 * 4 / 3)), 0])


def test_the_best_stand_first_and_equals_in_their_order() -> None:
    ranked = RankedPassages(["Ana lives.", "Ana sang in Rome.", "Ben ran.", "Rome is old and Rome is big."])
    assert ranked.best("She sang in Rome", 2) == ["Ana sang in Rome.", "Rome is old and Rome is big."]
    assert ranked.best("nothing of it", 2) == ["Ana lives.", "Ana sang in Rome."]
    assert len(ranked.best("Ana", 9)) == 4
    assert RankedPassages([]).best("Ana", 3) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Ana's 2 SONGS", ["ana", "s", "2", "songs"]),
        ("Straße ﬁn", ["strasse", "fin"]),
        ("她1990年生于罗马。", ["她", "1990", "年", "生", "于", "罗", "马"]),
        ("Анна родилась", ["анна", "родилась"]),
        ("", []),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
    ],
)
def test_words_have_no_case_and_signs_without_spaces_stand_alone(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_a_text_without_spaces_is_found() -> None:
    passages = cut_passages("她生于罗马。她是歌手。她死于巴黎。", 6)
    assert passages == ["她生于罗马。", "她是歌手。", "她死于巴黎。"]
    assert RankedPassages(passages).best("她可能死于巴黎", 1) == ["她死于巴黎。"]


def test_passages_are_whole_sentences_as_many_as_fit() -> None:
    text = "Ana sang. Ben ran.\n\nDr. Cy hit it. " + "x" * 25 + " tail"
    assert cut_passages(text, 20) == ["Ana sang. Ben ran.", "Dr. Cy hit it. xxxxx", "x" * 20, "tail"]
    assert cut_passages("  \n ", 20) == []
    assert cut_passages("one two three four", 9) == ["one two", "three", "four"]


@pytest.mark.parametrize("length", [1, 7, 100])
def test_no_passage_is_longer_and_nothing_is_lost(length: int) -> None:
    rng = random.Random(length)
    text = "".join(rng.choice("ab.! \n\t罗。") for _ in range(2000))
    passages = cut_passages(text, length)
    assert all(0 < len(passage) <= length and passage == passage.strip() for passage in passages)
    assert "".join("".join(passages).split()) == "".join(text.split())
