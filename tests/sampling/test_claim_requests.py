"""Claims of long texts by a chat model: how lists and verdicts are read, what is asked, and the whole way against a
server, to the calibration error."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.claims import Claim, ClaimCheck, ListedClaims
from espalier.data.forecasts import CheckedClaim
from espalier.data.jsonl import read_records, write_json, write_records
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.pipeline.evaluation.join_claims import JoinClaims
from espalier.pipeline.evaluation.measure_calibration import MeasureCalibration
from espalier.pipeline.stage import StageContext
from espalier.sampling.claim_requests import CheckRequests, SplitRequests, parse_claims, parse_supported
from espalier.sampling.llm_judge import chat_request
from tests.sampling.test_calibration_requests import ask
from tests.support.chat_server import ChatServer, chat_answer

ROW = {"claim": "Ana sang.", "confidence": None, "subjective": False, "alternatives": ""}
ANA = Claim("Ana sang.", None, False, "")


def listed(*rows: Any, indent: int | None = None) -> str:
    return "Claims:\n" + json.dumps(rows, indent=indent, ensure_ascii=False)


@pytest.mark.parametrize(
    ("response", "claims"),
    [
        (listed(ROW), [ANA]),
        (f"One thing is said.\n\n**{listed(ROW, indent=1).replace(':', ':**', 1)}", [ANA]),
        (f"Claims:\n```json\n{json.dumps([ROW])}\n```\n", [ANA]),
        (f"Claims: {json.dumps([ROW])}", [ANA]),
        ("Claims:\r\n[]", []),
        (listed(ROW | {"confidence": 1, "alternatives": None, "number": 7}), [Claim("Ana sang.", 1, False, "")]),
        (listed(ROW | {"claim": " 她可能 {生}\n。", "subjective": True}), [Claim("她可能 {生} 。", None, True, "")]),
        (listed(ROW, ROW), [ANA]),
    ],
)  # fmt: skip
def test_claims_are_the_list_behind_the_mark(response: str, claims: list[Claim]) -> None:
    assert parse_claims(response) == claims


@pytest.mark.parametrize(
    "response",
    [
        "",
        "[]",
        "Claims:",
        "Claims: none",
        listed(ROW) + "\nThat is all.",
        f"Claims:\n```json\n{json.dumps([ROW])}\n```\nThat is all.",
        listed(ROW)[:-1],
        listed(ROW) + "\n" + listed(ROW),
        "Claims:\n" + json.dumps(ROW),
        listed("Ana sang."),
        listed({name: value for name, value in ROW.items() if name != "confidence"}),
        listed(ROW | {"claim": " "}),
        listed(ROW | {"claim": 3}),
        listed(ROW | {"subjective": "no"}),
        listed(ROW | {"alternatives": 0}),
        *(listed(ROW | {"confidence": number}) for number in (60, 1.01, -0.1, "60%", "0.6", True)),
        'Claims:\n[{"claim": "x", "confidence": NaN, "subjective": false, "alternatives": ""}]',
        'Claims:\n[{"claim": "x", "confidence": 1e999, "subjective": false, "alternatives": ""}]',
        'Claims:\n[{"claim": "x \\ud83d", "confidence": null, "subjective": false, "alternatives": ""}]',
        'Claims:\n[{"claim": "x", "claim": "y", "confidence": null, "subjective": false, "alternatives": ""}]',
        listed(ROW, ROW | {"confidence": 0.5}),
        "Claims:\n" + "[" * 100_000,
    ],
)
def test_what_is_no_such_list_is_missing(response: str) -> None:
    assert parse_claims(response) is None


def test_a_verdict_is_the_last_line() -> None:
    said = ["It says so.\nSupported: yes", "**Supported: no**", "Supported: yes\nmaybe", "Supported: partly", "",
            "Supported: yes\nSupported: no"]  # fmt: skip
    assert [parse_supported(one) for one in said] == [True, False, None, None, None, None]


def test_half_a_character_is_refused_before_it_is_asked() -> None:
    with pytest.raises(BadInput, match="request 'p/0': character 5 of the prompt is half a character"):
        chat_request("p/0", "half \ud83d")


def claims_row(name: str, *claims: Claim, topic: str = "p") -> ListedClaims:
    columns = [[claim.confidence for claim in claims], [claim.is_subjective for claim in claims],
               [claim.alternatives for claim in claims]]  # fmt: skip
    return ListedClaims(f"{name}/0", name, topic, [claim.text for claim in claims], *columns, "", "stop")  # type: ignore[arg-type]


def check_requests(folder: Path, sources: list[dict[str, str]], *rows: ListedClaims, **settings: Any) -> CheckRequests:
    write_records(folder / "c.jsonl", rows)
    write_records(folder / "s.jsonl", sources)
    settings = {"num_passages": 2, "passage_length": 30} | settings
    return CheckRequests(str(folder / "c.jsonl"), str(folder / "s.jsonl"), **settings)


def test_a_claim_is_shown_the_passages_that_fit_it(tmp_path: Path) -> None:
    sources = [{"topic_id": "other", "text": "Ana {claim} other."}, {"topic_id": "p", "text": "Ana lives. Ana ran."},
               {"topic_id": "p", "text": "She {claim} sang in Rome. Nobody knows when she did that."}]  # fmt: skip
    claims = [Claim("Ana likely sang {passages} in Rome.", None, False, ""), Claim("She is fine.", None, True, "")]
    source = check_requests(tmp_path, sources, claims_row("p/0", *claims))
    (request,) = source.load(None, None)  # type: ignore[arg-type]
    assert request.id == "p/0~0"
    first, second = "She {claim} sang in Rome.", "Ana lives. Ana ran."
    assert f"<passage_1>\n{first}\n</passage_1>\n<passage_2>\n{second}\n</passage_2>\n\n<claim>\n" in request.prompt
    assert "<claim>\nAna likely sang {passages} in Rome.\n</claim>" in request.prompt
    assert "other." not in request.prompt


@pytest.mark.parametrize(
    ("sources", "settings", "message"),
    [
        ([{"topic_id": "q", "text": "x"}], {}, r"s.jsonl: has no text about 'p' \(1 of 1 topics have none\)"),
        ([{"topic_id": "p", "text": " \n"}], {}, "has no text about 'p'"),
        ([{"topic_id": "p", "text": "\ud83d"}], {}, "s.jsonl:1: character 0"),
        ([{"topic": "p", "text": "x"}], {}, "s.jsonl:1: SourceDocument has no field 'topic'"),
        ([], {"num_passages": 0}, "num_passages"),
        ([], {"passage_length": 0}, "passage_length"),
        ([], {"template": "{claim}"}, "lacks {passages}"),
    ],
)
def test_a_bad_source_is_one_line_before_anything_is_asked(
    tmp_path: Path, sources: list[dict[str, str]], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        check_requests(tmp_path, sources, claims_row("p/0", ANA), **settings).load(None, None)  # type: ignore[arg-type]


def test_without_claims_nothing_is_asked(tmp_path: Path) -> None:
    opinion = Claim("She is fine.", None, True, "")
    unread = ListedClaims("r/0/0", "r/0", "r", None, [], [], [], "?", "stop")
    with pytest.raises(BadInput, match=r"c.jsonl: no claim to check"):
        check_requests(tmp_path, [], claims_row("p/0", opinion), claims_row("q/0"), unread).load(None, None)  # type: ignore[arg-type]
    write_records(tmp_path / "p.jsonl", [Problem("p", "Who is p?", "")])
    write_records(tmp_path / "t.jsonl", [sampled("p", 0, " \n")])
    with pytest.raises(BadInput, match="every response is blank"):
        SplitRequests(str(tmp_path / "t.jsonl"), str(tmp_path / "p.jsonl")).load(None, None)  # type: ignore[arg-type]


def sampled(problem: str, k: int, text: str, finish: str = "stop") -> Trajectory:
    return Trajectory(f"{problem}/{k}", problem, "Write.\n", text, [text], [1], [2], [1], finish, "", None, False)


TEXTS = {
    "Ana {question}": [
        ROW | {"claim": "Ana sang."},
        ROW | {"claim": "Ana likely ran."},
        ROW | {"claim": "Ana is 60% sure to be from Rome.", "confidence": 0.6, "alternatives": "home"},
        ROW | {"claim": "Ana is possibly from Oslo.", "alternatives": "home"},
        ROW | {"claim": "Ana is great.", "subjective": True},
    ],
    "Ana again": [
        ROW | {"claim": "Ana is 20% sure to be from Oslo.", "confidence": 0.2, "alternatives": "home"},
        ROW | {"claim": "It is doubtful that Ana sang."},
    ],
    "Ben": [ROW | {"claim": "Ben flew."}, ROW | {"claim": "broken"}],
    "Nothing is known.": [],
}
SOURCES = [{"topic_id": "p", "text": "Ana sang. She was born in Rome."}, {"topic_id": "q", "text": "Ben flew."}]


def reader(number: int, body: dict[str, Any]) -> Any:
    """Splits by the table above; a claim is supported where its last word is in a passage."""
    asked = body["messages"][0]["content"]
    text = re.search(r"<text>\n(.*?)\n</text>", asked, re.DOTALL)
    if text:
        return chat_answer(listed(*TEXTS[text.group(1)]) if text.group(1) in TEXTS else "I cannot.")
    claim = asked.split("<claim>\n")[-1].split("\n</claim>")[0]
    if claim == "broken":
        return chat_answer("Supported: yes", finish_reason="length")
    is_supported = claim.rstrip(".").split()[-1] in asked.split("<claim>")[0].split("<passage_1>")[-1]
    return chat_answer(f"Let me see.\nSupported: {'yes' if is_supported else 'no'}")


def test_the_whole_way_from_texts_to_the_calibration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test-0123")
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("problems", "texts", "claims", "sources", "checks", "out")}
    write_records(paths["problems"], [Problem(name, f"Who is {name}?", "") for name in "pqr"])
    rows = [sampled("p", 0, "Ana {question}"), sampled("p", 1, "Ana again"), sampled("q", 0, "Ben"),
            sampled("r", 0, "Nothing is known."), sampled("q", 1, "unreadable"), sampled("r", 1, ""),
            sampled("r", 2, "cut", "length")]  # fmt: skip
    write_records(paths["texts"], rows)
    write_records(paths["sources"], SOURCES)
    splits = [f"requests.trajectories={paths['texts']}", f"requests.problems={paths['problems']}"]
    checks = [f"requests.claims={paths['claims']}", f"requests.sources={paths['sources']}"]
    with ChatServer(reader) as server:
        assert ask(server, paths["claims"], "split_claims", *splits) == 0
        assert len(server.bodies) == 5
        assert "Who is p?" in "".join(body["messages"][0]["content"] for body in server.bodies)
        assert ask(server, paths["checks"], "check_claims", *checks) == 0
        assert ask(server, paths["checks"], "check_claims", *checks) == 0
        assert len(server.bodies) == 5 + 8
    metas = [json.loads(paths[name].with_suffix(".meta.json").read_text()) for name in ("claims", "checks")]
    assert [meta["counts"]["unparseable"] for meta in metas] == [1 / 5, 1 / 8]
    lists = {row.trajectory_id: row.claims for row in read_records(ListedClaims, paths["claims"])}
    assert {name: len(claims or ()) for name, claims in lists.items()} == {"p/0": 5, "p/1": 2, "q/0": 2, "r/0": 0,
                                                                           "q/1": 0}  # fmt: skip
    assert lists["q/1"] is None
    verdicts = {row.claim: row.is_supported for row in read_records(ClaimCheck, paths["checks"])}
    assert verdicts["broken"] is None
    context = StageContext(None, paths["out"], 10.0)
    write_records(
        paths["out"], JoinClaims(str(paths["claims"]), str(paths["checks"])).run(str(paths["texts"]), context)
    )
    assert context.counts == {"cut": 1, "not_split": 1, "without_claims": 2, "opinions": 1, "not_checked": 1}
    again = [replace(row, response="Ana ran.") for row in read_records(Trajectory, paths["texts"])]
    write_records(tmp_path / "again.jsonl", again)
    with pytest.raises(BadInput, match=r"is what a chat model read in another file than .*again\.jsonl"):
        list(JoinClaims(str(paths["claims"]), str(paths["checks"])).run(str(tmp_path / "again.jsonl"), context))
    assert [(row.id, row.is_supported) for row in read_records(CheckedClaim, paths["out"])] == [
        ("p/0~0", True), ("p/0~1", False), ("p/0~2", True), ("p/0~3", False), ("p/1~0", False), ("p/1~1", True),
        ("q/0~0", True),
    ]  # fmt: skip
    # plain (1, right), likely (0.75, wrong), the most confident home of one text (0.6, right) and of the other
    # (0.2, wrong), doubtful (0.1, right), plain (1, right): six bins of one claim each
    found = MeasureCalibration("claims", 10, 100).run(str(paths["out"]), StageContext(None, tmp_path / "m.json", 10.0))
    write_json(tmp_path / "m.json", found)
    assert found["num_rows"] == 6
    assert found["figures"]["accuracy"]["mean"] == pytest.approx(4 / 6, abs=1e-5)
    assert found["figures"]["ece"]["mean"] == pytest.approx((0 + 0.75 + 0.4 + 0.2 + 0.9 + 0) / 6, abs=1e-5)
    assert found["figures"]["brier"]["mean"] == pytest.approx((0.75**2 + 0.4**2 + 0.2**2 + 0.9**2) / 6, abs=1e-5)
