"""TRL's own trainers beside this project: the same tokens learnt of the same rows, the same scores of one model."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.road import trl
from benchmarks.road.trl import UNREAD, Tokens, seen, verdict, without_ends, without_openings

needs_trl = pytest.mark.skipif(
    not (trl.ROOT / ".venv-bench" / "installed").is_file(), reason="no TRL: bash scripts/install_bench.sh"
)


def test_what_no_loss_reads_is_left_out() -> None:
    assert seen(Tokens([5, 6, 7, 8], [5, UNREAD, 7, UNREAD])) == Tokens([5, 6, 7], [UNREAD, UNREAD, 7])
    assert seen(Tokens([5, 6])) == Tokens([5, 6]), "read at its end"


def test_only_what_stands_behind_an_end_token_is_taken_off() -> None:
    end, new = 2, 9
    talk = Tokens([5, new, 6, end, new, 5, 7, end, new], [UNREAD, new, 6, end, new, UNREAD, 7, end, new])
    changed = without_ends(talk, end)
    assert changed.labels == [UNREAD, new, 6, end, UNREAD, UNREAD, 7, end, UNREAD]
    assert without_openings(changed, new).labels[:4] == [UNREAD, UNREAD, 6, end]
    assert without_ends(Tokens([5, end, 6, end, new]), end).ids == [5, end, 6, end]


def test_a_verdict_names_the_least_change(tokenizer: Any) -> None:
    end, new = tokenizer.eos_token_id, tokenizer("\n", add_special_tokens=False).input_ids[-1]

    def compare(ours: list[int], theirs: list[int], value: int = 1) -> str:
        one, other = (Tokens([40, *labels], [UNREAD, *labels], 1) for labels in (ours, theirs))
        return verdict(one, Tokens(other.ids, other.labels, value), tokenizer)

    assert compare([41, end], [41, end]) == "equal"
    assert compare([41, end], [41, end, new]) == "end"
    assert compare([41, end], [42, end]) == compare([41, end], [41, end], value=0) == "differs"
    opened = Tokens([40, new, 41, end, new], [UNREAD, new, 41, end, new])
    assert verdict(Tokens([40, new, 41, end], [UNREAD, UNREAD, 41, end]), opened, tokenizer) == "opening, end"
    one, two = (tokenizer(text, add_special_tokens=False).input_ids for text in ("doubles", "doub"))
    apart = [*two, *tokenizer("les", add_special_tokens=False).input_ids]
    assert apart != one
    assert compare([*apart, end], [*one, end]) == "apart"


def expected(layout: str, template: str) -> str:
    """Return the verdict that docs/data.md gives a reason for."""
    if "turns" not in layout and "messages" not in layout:
        return "equal"
    if layout.startswith("GRPO") or template in ("Llama 3", "pieces"):
        return "equal"
    if "assistant_only_loss" in layout and template == "marked":
        return "equal"
    if layout == "SFT: messages, assistant_only_loss" and template == "Qwen2.5":
        return "opening, end"
    return "apart" if template == "plain" else "end"


@needs_trl
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_layout_is_learnt_as_trl_learns_it(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common", reason="the published tokenizers lie in the package mistral_common")
    found, _ = trl.compare(tmp_path)
    assert len(found) == 18
    for layout, row in found.items():
        assert row == {template: expected(layout, template) for template in row}, layout


@needs_trl
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trl_scores_exported_models_as_we_do(tmp_path: Path) -> None:
    gaps = trl.score_gaps(tmp_path)
    assert len(gaps) == 3
    assert max(gaps.values()) < 1e-5
