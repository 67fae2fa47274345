"""A model folder whose generation settings transformers would not write again is trained and saved all the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from espalier.models.load import load_policy

VICUNA = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": [1, 7], "bos_token_id": 2, "pad_token_id": 0}


def saved(policy: Path, folder: Path, settings: dict[str, Any], file: str) -> GenerationConfig:
    """What the folder of a model says that was loaded from one with these settings in `file`."""
    shutil.copytree(policy, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(before | settings))
    load_policy(str(folder)).save_pretrained(folder / "saved")
    return GenerationConfig.from_pretrained(folder / "saved")


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_sampling_settings_without_do_sample_are_saved_with_it(
    file: str, tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = saved(tiny_policy, tmp_path / "model", VICUNA, file)
    assert (found.do_sample, found.temperature, found.top_p) == (True, 0.9, 0.6)
    assert (found.eos_token_id, found.bos_token_id, found.pad_token_id) == ([1, 7], 2, 0)
    lines = [row.getMessage() for row in caplog.records if row.levelname == "WARNING" and "espalier" in row.name]
    assert lines == [f"{tmp_path}/model: its generation settings contradict themselves (temperature, top_p): a model "
                     "trained from it is saved with do_sample=true"]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"do_sample": False, "temperature": 0.0, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"temperature": 0.0}, {}),
        ({"do_sample": False, "top_p": 0.6, "temperature": 0.9}, {}),
        ({"pad_token_id": -1, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"output_attentions": True, "length_penalty": 2.0}, {}),
        ({"early_stopping": True, "num_beams": 1, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_what_contradicts_itself_is_left_out_and_end_tokens_stay(
    settings: dict[str, Any], kept: dict[str, Any], tiny_policy: Path, tmp_path: Path
) -> None:
    found = saved(tiny_policy, tmp_path / "model", {"eos_token_id": [1, 7], **settings}, "generation_config.json")
    assert found.do_sample in (None, False)
    assert found.eos_token_id == [1, 7]
    assert {name: getattr(found, name) for name in kept} == kept
    assert found.temperature in (None, 1.0)


def test_settings_that_can_be_saved_are_left_alone(
    tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": 1}
    found = saved(tiny_policy, tmp_path / "model", settings, "generation_config.json")
    assert {name: getattr(found, name) for name in settings} == settings
    assert "contradict" not in caplog.text
