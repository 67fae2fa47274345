"""The table of docs/reliability.md is what benchmarks/results/faults.json says; callers start without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability_page import PAGE, SAYS, defects_table, table, with_table
from benchmarks.result import RESULTS
from benchmarks.silence.defects import read_defects
from espalier.models import load
from espalier.models.tokenizer import is_plain, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent


def result(**changes: Any) -> dict[str, Any]:
    figure = {"value": 1.0, "unit": "share", "goal": 1.0, "better": "higher", "met": True}
    figures = {name: {**figure, **changes.get(name, {})} for name in SAYS}
    kills, disk = {"kills": 200, "runs": 70, "kills_while_rows_came": 90}, {"places": 31, "by": "tmpfs"}
    made = {"date": "2030-01-02", "commit": "abc", "machine": "2 cores"}
    return {"figures": figures, "detail": {"kills": kills, "full_disk": disk}, **made}


def test_a_goal_that_is_missed_is_written_as_it_is() -> None:
    missed = {"value": 1.75, "unit": "requests", "goal": 1.6, "better": "lower", "met": False}
    lines = table(result(flaky_requests_per_row=missed)).split("\n")
    assert "| the same: how often a prompt is asked | ≤ 1.6 requests | 1.75 requests | **no** |" in lines
    assert sum(line.endswith("| ≥ 1 | 1 | yes |") for line in lines) == len(SAYS) - 1
    assert lines[-1].startswith("200 kills in 70 runs, 90 of them while rows were being written; 31 places")


def test_the_table_is_put_between_its_marks_and_again() -> None:
    page = PAGE.read_text()
    once = with_table(page, "faults.json", table(result()))
    assert with_table(once, "faults.json", table(result())) == once
    assert once.startswith("# Reliability\n")
    assert once.endswith(page[-200:])


def test_the_page_holds_the_stored_result() -> None:
    for name, make in (("faults.json", table), ("silence.json", defects_table)):
        path = RESULTS / name
        if not path.is_file():
            pytest.skip(f"no benchmarks/results/{name}: bash scripts/bench.sh, scripts/faults.sh")
        assert with_table(PAGE.read_text(), name, make(json.loads(path.read_text()))) == PAGE.read_text()


def test_every_defects_tests_are_in_the_suite() -> None:
    for defect in read_defects():
        for name in defect.tests:
            file, _, test = name.partition("::")
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), name


def test_a_caller_of_a_server_loads_no_torch(tiny_policy: Path) -> None:
    program = f"""
import sys
import service_api_caller_v1, sampling.vllm_client, sampling.requests, data.tasks.word_arithmetic
from espalier.models.tokenizer import load_tokenizer
load_tokenizer({str(tiny_policy)!r})
sys.exit(",".join(name for name in ("torch", "vllm", "openai", "sympy") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_a_plain_tokenizer_is_the_same_either_way(tiny_policy: Path) -> None:
    assert is_plain(str(tiny_policy))
    mine, general = load_tokenizer(str(tiny_policy)), load.load_tokenizer(str(tiny_policy))
    assert type(mine) is type(general)
    assert mine.get_vocab() == general.get_vocab()
    assert (mine.eos_token_id, mine.pad_token_id) == (general.eos_token_id, general.pad_token_id)
    text = "Mia has 12 apples.\n#### 12 <|end|> naïve 数"
    assert mine(text).input_ids == general(text).input_ids
    assert mine.decode(mine(text).input_ids) == text


@pytest.mark.parametrize(
    "settings", ['{"tokenizer_class": "Qwen2Tokenizer", "pad_token": "x"}', '{"tokenizer_class": "TokenizersBackend"}',
                 "not json", "[]", '{"tokenizer_class": "TokenizersBackend", "pad_token": "x", "auto_map": {}}'],
)  # fmt: skip
def test_a_tokenizer_of_another_kind_is_loaded_the_general_way(settings: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(settings)
    assert not is_plain(str(tmp_path))


def test_a_folder_that_is_none_is_explained_the_general_way(tmp_path: Path) -> None:
    with pytest.raises(load.BadModel, match="no such model folder"):
        load_tokenizer(str(tmp_path / "gone"))
