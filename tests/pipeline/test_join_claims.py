"""Claims and their checks joined: what is left out with what, and files that are not of one another."""

import dataclasses
from pathlib import Path

import pytest

from espalier.data.claims import Claim, ClaimCheck, ListedClaims
from espalier.data.forecasts import CheckedClaim
from espalier.data.jsonl import write_records
from espalier.data.records import BadInput
from espalier.pipeline.evaluation.join_claims import JoinClaims
from espalier.pipeline.stage import StageContext
from tests.sampling.test_claim_requests import claims_row, sampled

CLAIMS = [Claim("Ana sang.", None, False, ""), Claim("Likely of Rome.", 0.6, False, "home"),
          Claim("Of Oslo.", 0.3, False, "home"), Claim("Great.", None, True, "home")]  # fmt: skip
ROW = claims_row("p/0", *CLAIMS)


def check(place: int, verdict: bool | None, vote: int = 0, text: str = "") -> ClaimCheck:
    name = f"p/0~{place}"
    return ClaimCheck(f"{name}/{vote}", name, "p", text or CLAIMS[place].text, verdict, "", "stop")


def join(
    folder: Path, checks: list[ClaimCheck], lists: list[ListedClaims]
) -> tuple[list[CheckedClaim], dict[str, int]]:
    write_records(folder / "t.jsonl", [sampled("p", 0, "Ana")])
    write_records(folder / "c.jsonl", lists)
    write_records(folder / "k.jsonl", checks)
    context = StageContext(None, folder / "out.jsonl", 10.0)
    stage = JoinClaims(str(folder / "c.jsonl"), str(folder / "k.jsonl"))
    return list(stage.run(str(folder / "t.jsonl"), context)), context.counts


def test_most_votes_decide_and_a_tie_is_no(tmp_path: Path) -> None:
    votes = [check(0, True), check(0, False, 1), check(0, True, 2), check(1, True), check(1, False, 1), check(2, True),
             check(2, None, 1)]  # fmt: skip
    rows, counts = join(tmp_path, votes, [ROW])
    assert rows == [
        CheckedClaim("p/0~0", "p", "Ana sang.", True, 1.0),
        CheckedClaim("p/0~1", "p", "Likely of Rome.", False, 0.6, alternatives="p/0/home"),
        CheckedClaim("p/0~2", "p", "Of Oslo.", True, 0.3, alternatives="p/0/home"),
    ]
    assert counts == {"cut": 0, "not_split": 0, "without_claims": 0, "opinions": 1, "not_checked": 0}


def test_a_percentage_that_is_no_confidence_is_none(tmp_path: Path) -> None:
    texts = {"Ana owns 51% of it.": None, "Ana likely owns 51% of it.": None, "I am 51% sure of Ana.": 0.51}
    row = claims_row("p/0", *(Claim(text, number, False, "") for text, number in texts.items()))
    checks = [check(place, True, text=text) for place, text in enumerate(texts)]
    rows, _ = join(tmp_path, checks, [row])
    assert [row.confidence for row in rows] == [1.0, 0.75, 0.51]


def test_alternatives_are_left_out_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, counts = join(tmp_path, [check(0, True), check(1, None), check(2, True)], [ROW])
    assert [row.id for row in rows] == ["p/0~0"]
    assert counts["not_checked"] == 2
    assert "2 of 3 claims have no verdict, or exclude one without and are left out" in caplog.text


def test_the_first_vote_with_a_list_counts(tmp_path: Path) -> None:
    unread = ListedClaims("p/0/0", "p/0", "p", None, [], [], [], "?", "stop")
    later = [dataclasses.replace(ROW, id="p/0/1"), claims_row("p/0")]
    lists = [unread, later[0], dataclasses.replace(later[1], id="p/0/2")]
    rows, _ = join(tmp_path, [check(0, True)], lists)
    assert [row.text for row in rows] == ["Ana sang."]


@pytest.mark.parametrize(
    ("checks", "lists", "message"),
    [
        ([check(0, True, text="Ben sang.")], [ROW], "k.jsonl: 'p/0~0/0' checks another claim than .*c.jsonl"),
        ([check(3, True)], [ROW], "checks another claim"),
        ([check(0, True), check(0, False)], [ROW], "id 'p/0~0/0' stands already"),
        ([], [claims_row("p/0", topic="q")], "'p/0/0' is of the response 'p/0' to 'q', which .*t.jsonl does not"),
        ([], [claims_row("p/7")], "is of the response 'p/7'"),
        ([], [ROW], "t.jsonl: no claim was checked"),
    ],
)  # fmt: skip
def test_files_of_other_claims_are_refused(
    tmp_path: Path, checks: list[ClaimCheck], lists: list[ListedClaims], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        join(tmp_path, checks, lists)


def test_a_list_needs_one_entry_for_each_claim() -> None:
    with pytest.raises(BadInput, match="1 claims, 0 confidences"):
        ListedClaims("p/0/0", "p/0", "p", ["Ana sang."], [], [], [], "", "stop")
