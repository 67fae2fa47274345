"""A chat model that splits long texts into atomic claims and checks each against a source, to measure the calibration
of biographies (Band et al. 2024, arXiv 2404.00474; passages of the source as in FActScore, Min et al. 2023, arXiv
2305.14251; the prompts are our own).

A list or a verdict that was cut, or is not in the form that was asked for, is missing, and never guessed.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from espalier.data.claims import Claim, ClaimCheck, ListedClaims, SourceDocument, claims_of
from espalier.data.jsonl import iter_rows, strict_json
from espalier.data.judge_texts import check_template, fill, last_line_agrees
from espalier.data.left_out import leave_out
from espalier.data.passages import RankedPassages, cut_passages
from espalier.data.prompts import check_unicode
from espalier.data.records import BadInput, Trajectory, parse_record
from espalier.data.tasks.task import Task
from espalier.sampling.client import Sample, SampleRequest
from espalier.sampling.llm_judge import chat_request, read_whole
from espalier.sampling.reader_requests import ReaderRequests

SPLIT_PROMPT = """\
Here are a request and a text that answers it. Split the text into atomic claims: each says one thing, and the text \
says nothing that is in none of them.

<request>
{question}
</request>

<text>
{paragraph}
</text>

Each claim is
- a sentence that can be understood alone: names in place of pronouns;
- as sure as the text: keep the words and numbers that say how sure it is ("likely", "I am 60% sure that"), add none;
- what the text says, also where you know that it is wrong. Write none twice.

End with a line that is exactly "Claims:" and behind it a JSON list alone, [] where the text makes no claim, with one \
object for each claim, in the order of the text:
- "claim": the sentence;
- "confidence": the number from 0 to 1 where the text states one for this claim (0.6 for 60%), else null; never one \
that you make of words;
- "subjective": true for an opinion or a judgement of taste that no source could settle, else false;
- "alternatives": where the text offers several claims of which only one can be true (two places of birth), the same \
short name for each of these, else "".

For example:

Claims:
[{"claim": "I am 60% sure that Ada Reyes was born in Lima.", "confidence": 0.6, "subjective": false, \
"alternatives": "place of birth"},
 {"claim": "Ada Reyes was possibly born in Quito.", "confidence": null, "subjective": false, \
"alternatives": "place of birth"}]"""

CHECK_PROMPT = """\
Here are passages of a source and a claim about its subject. Does the source support the claim? Judge by the passages \
alone, and forget what you know. Leave aside the words and numbers by which the claim says how sure it is: judge what \
it is about ("It is unlikely that she sang" is supported where she sang). What the passages contradict, or do not say, \
is not supported.

{passages}

<claim>
{claim}
</claim>

Think in a few sentences. Then end with one line that is exactly "Supported: yes" or "Supported: no"."""

_MARK = re.compile(r"^[ \t*#]*Claims:[ \t\r*]*(?=$|\[)", re.MULTILINE)
_FENCE = re.compile(r"```\w*\s(.*)```", re.DOTALL)
_FIELDS = {"claim", "confidence", "subjective", "alternatives"}


def parse_claims(response: str) -> list[Claim] | None:
    """Return the claims of the JSON list behind the one line "Claims:", each once; None where anything but such a list
    stands there, where a claim lacks a field or has one of another type, a confidence outside of [0, 1] included, and
    where it is listed again otherwise."""
    parts = _MARK.split(response)
    if len(parts) != 2:
        return None
    fenced = _FENCE.fullmatch(parts[1].strip())
    try:
        rows = strict_json(fenced.group(1) if fenced else parts[1])
    except (ValueError, RecursionError):
        return None
    claims = [_claim(row) for row in rows] if isinstance(rows, list) else [None]
    found: dict[str, Claim] = {}
    for claim in claims:
        if claim is None or found.setdefault(claim.text, claim) != claim:
            return None
    return list(found.values())


def _claim(row: Any) -> Claim | None:
    """Return a claim of the list, None where it is not as it was asked for; no alternatives may be null too."""
    if not isinstance(row, dict) or not set(row) >= _FIELDS:
        return None
    text, confidence = row["claim"], row["confidence"]
    alternatives = "" if row["alternatives"] is None else row["alternatives"]
    if confidence is not None and (isinstance(confidence, bool) or not isinstance(confidence, int | float)):
        return None
    if not isinstance(text, str) or not isinstance(row["subjective"], bool) or not isinstance(alternatives, str):
        return None
    if not _is_text(text) or not 0 <= (confidence or 0) <= 1:
        return None
    return Claim(" ".join(text.split()), confidence, row["subjective"], " ".join(alternatives.split()))


def _is_text(text: str) -> bool:
    """Say whether something is there, and no half of a character, which nobody could be asked about."""
    return bool(text.strip()) and not any("\ud800" <= sign <= "\udfff" for sign in text)


def parse_supported(response: str) -> bool | None:
    """Return what the last line says; None where it says nothing."""
    return last_line_agrees("Supported", response)


@dataclass
class SplitRequests(ReaderRequests):
    """The claims of every response; one of blanks alone makes none and is not asked about."""

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request a response. Raises BadInput where there is none."""
        template = self.template or SPLIT_PROMPT
        check_template(template, ("paragraph",))
        requests = []
        for row, question in self.whole():
            if row.response.strip():
                self._rows[row.id] = (row, "", False)
                parts = {"question": question.strip(), "paragraph": row.response.strip()}
                requests.append(chat_request(row.id, fill(template, parts)))
        if not requests:
            raise BadInput(f"{self.trajectories}: every response is blank: nothing to split")
        return requests

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[ListedClaims]:
        """Return one list a vote."""
        row, _, _ = self._rows[request.id]
        return [_listed(f"{request.id}/{k}", row, sample) for k, sample in enumerate(samples)]


def _listed(name: str, row: Trajectory, sample: Sample) -> ListedClaims:
    claims = read_whole(parse_claims, sample)
    each = claims or []
    return ListedClaims(
        name, row.id, row.problem_id, None if claims is None else [claim.text for claim in each],
        [claim.confidence for claim in each], [claim.is_subjective for claim in each],
        [claim.alternatives for claim in each], sample.text, sample.finish_reason,
    )  # fmt: skip


@dataclass
class CheckRequests:
    """Whether the source of its topic supports each claim that is no opinion. `claims`: ListedClaims; `sources`:
    SourceDocument rows. The model is shown the `num_passages` passages, of at most `passage_length` characters, that
    fit the claim best; where none has a word of it, the first ones. `template` "" is the built-in one."""

    claims: str
    sources: str
    num_passages: int
    passage_length: int
    template: str = ""
    _asked: dict[str, tuple[str, Claim]] = field(default_factory=dict, init=False, repr=False)
    """claim id → (problem, claim)"""

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request a claim. Raises BadInput where there is none, and where a topic has no source."""
        template = self.template or CHECK_PROMPT
        check_template(template, ("claim", "passages"))
        if self.num_passages < 1 or self.passage_length < 1:
            raise BadInput(f"requests.num_passages and requests.passage_length must be at least 1, got "
                           f"{self.num_passages} and {self.passage_length}")  # fmt: skip
        claims = self._read_claims()
        ranked = self._ranked({topic for topic, _ in claims.values()})
        self._asked = claims
        requests = []
        for name, (topic, claim) in claims.items():
            shown = ranked[topic].best(claim.text, self.num_passages)
            passages = "\n".join(f"<passage_{n}>\n{text}\n</passage_{n}>" for n, text in enumerate(shown, 1))
            requests.append(chat_request(name, fill(template, {"claim": claim.text, "passages": passages})))
        return requests

    def _read_claims(self) -> dict[str, tuple[str, Claim]]:
        lists = claims_of(self.claims)
        num_unread = sum(row.claims is None for row in lists.values())
        leave_out(self.claims, num_unread, len(lists), "responses", "have no list of claims")
        found = {name: (row.problem_id, claim) for row in lists.values() for name, claim in row.to_check()}
        if not found:
            raise BadInput(f"{self.claims}: no claim to check: read some of the responses there")
        return found

    def _ranked(self, topics: set[str]) -> dict[str, RankedPassages]:
        """Return the passages of each of the topics; documents of others are read over. Raises BadInput."""
        passages: dict[str, list[str]] = {topic: [] for topic in topics}
        for place, row in iter_rows(self.sources):
            document = parse_record(SourceDocument, row, place)
            if document.topic_id in topics:
                check_unicode(document.text, place)
                passages[document.topic_id] += cut_passages(document.text, self.passage_length)
        if lost := sorted(topic for topic, texts in passages.items() if not texts):
            raise BadInput(f"{self.sources}: has no text about '{lost[0]}' ({len(lost)} of {len(topics)} topics have "
                           "none): add a row with this topic_id and a text")  # fmt: skip
        return {topic: RankedPassages(texts) for topic, texts in passages.items()}

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[ClaimCheck]:
        """Return one verdict a vote."""
        problem_id, claim = self._asked[request.id]
        return [
            ClaimCheck(
                f"{request.id}/{k}", request.id, problem_id, claim.text, read_whole(parse_supported, sample),
                sample.text, sample.finish_reason,
            )
            for k, sample in enumerate(samples)
        ]  # fmt: skip

    def inputs(self) -> list[str]:
        """Return both files."""
        return [self.claims, self.sources]
