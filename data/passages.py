"""Passages of a source, and which of them fit a text best by BM25 (Robertson and Zaragoza 2009, The Probabilistic
Relevance Framework; the published equation, k1 = 1.5, b = 0.75).

    score(q, d) = sum over words t of q:  idf(t) · f(t, d) · (k1 + 1) / (f(t, d) + k1 · (1 - b + b · |d| / mean |d|))
    idf(t)      = ln(1 + (N - n(t) + 1/2) / (n(t) + 1/2))

The logarithm is Lucene's, which is never negative: a subject's name stands in most passages of its own source, and the
published one would count it against them. Words are runs of letters, with the marks on them (vowels of Indic scripts),
and digits, without case; a sign of the scripts that are written without spaces (Chinese, Japanese kana) is a word of
its own.
"""

import math
import re
import textwrap
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from espalier.data.splitters.sentences import split_sentences

K1, B = 1.5, 0.75
_UNSPACED = "\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_MARKS = "".join(sign for sign in map(chr, range(0x300, 0x20000)) if unicodedata.category(sign).startswith("M"))
_WORD = re.compile(rf"[{_UNSPACED}]|(?![{_UNSPACED}])\w(?:(?![{_UNSPACED}])[\w{_MARKS}])*")


def words(text: str) -> list[str]:
    """Return the words of a text as they are compared."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def cut_passages(text: str, length: int) -> list[str]:
    """Return the text in passages of at most `length` characters, as many whole sentences each as fit; a longer
    sentence is cut between words, a longer word anywhere. No passage is blank, and none has white space around it."""
    passages: list[str] = []
    passage = ""
    for piece in _pieces(text, length):
        if passage and len((passage + piece).strip()) > length:
            passages.append(passage.strip())
            passage = ""
        passage += piece
    return [part for part in [*passages, passage.strip()] if part]


def _pieces(text: str, length: int) -> Iterator[str]:
    """Yield sentences, with the white space before them; one that is longer in parts."""
    for sentence in split_sentences(text):
        if len(sentence.strip()) <= length:
            yield sentence
        else:
            yield from (f" {line}" for line in textwrap.wrap(sentence.strip(), length, break_on_hyphens=False))


class RankedPassages:
    """The passages of one source, to be ranked for many texts."""

    def __init__(self, passages: Sequence[str]):
        self.passages = list(passages)
        counts = [Counter(words(passage)) for passage in self.passages]
        mean_length = fmean(count.total() for count in counts) if counts else 0.0
        self._found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for place, count in enumerate(counts):
            for word, number in count.items():
                shrunk = K1 * (1 - B + B * count.total() / mean_length)
                self._found[word].append((place, number * (K1 + 1) / (number + shrunk)))

    def scores(self, text: str) -> list[float]:
        """Return the BM25 score of every passage for a text; a word that the text repeats counts as often."""
        scores = [0.0] * len(self.passages)
        for word, times in Counter(words(text)).items():
            found = self._found.get(word, [])
            idf = math.log1p((len(scores) - len(found) + 0.5) / (len(found) + 0.5))
            for place, weight in found:
                scores[place] += times * idf * weight
        return scores

    def best(self, text: str, number: int) -> list[str]:
        """Return the `number` passages with the highest scores, the best first; of equals the one that stands first."""
        scores = self.scores(text)
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        return [self.passages[place] for place in order[:number]]
