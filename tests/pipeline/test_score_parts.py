"""Kept scores: those of the same models go on, as far as what is stored of them says."""

from pathlib import Path

import pytest

from espalier.data.records import BadInput
from espalier.pipeline.prm.score_steps import KeptScores
from espalier.pipeline.score_parts import ScoreParts


def test_scores_that_an_earlier_version_kept_go_on_with_the_same_model_and_no_other(tmp_path: Path) -> None:
    output = tmp_path / "scores.jsonl"

    def begin(*models: str) -> int:
        return ScoreParts(KeptScores, output, {"input": "i", "models": list(models)}).start

    assert begin("beginning") == 0
    (tmp_path / "scores.jsonl.parts" / "scores-0-0-0.jsonl").write_text("")
    assert begin("beginning:pieces") == 1
    for other in (["end:pieces"], ["beginning:pieces", "beginning:pieces"], []):
        with pytest.raises(BadInput, match=r"holds scores of another input or of other models \(models differs\)"):
            begin(*other)
