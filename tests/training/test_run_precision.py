"""What a run computes in: found once, kept in its config.yaml, whatever machine it goes on on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.run_dir import as_begun, check_run_dir, open_run_dir, stored_config
from espalier.runtime.schemas import RLConfig, TrainConfig
from espalier.training import run_precision
from espalier.training.run_precision import settle_precision
from tests.support.root_config import root_config


def of_machine(monkeypatch: pytest.MonkeyPatch, is_fast: bool) -> None:
    monkeypatch.setattr(run_precision, "has_fast_bf16", lambda kind: is_fast)


@pytest.mark.parametrize(("is_fast", "settled"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_what_the_machine_does_fast_and_is_said(
    is_fast: bool, settled: str, monkeypatch: pytest.MonkeyPatch, program_log: Callable[[Callable[[], Any]], str]
) -> None:
    of_machine(monkeypatch, is_fast)
    assert settle_precision(root_config(TrainConfig)).precision == settled
    said = program_log(lambda: settle_precision(root_config(TrainConfig)))
    assert f"train: computing in {settled}" in said
    for name in ("bf16", "fp32"):
        assert settle_precision(root_config(TrainConfig, precision=name)).precision == name


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_run_goes_on_in_what_it_began_with_on_another_machine(
    is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = root_config(TrainConfig, output_dir=str(tmp_path))
    of_machine(monkeypatch, is_fast)
    began = settle_precision(as_begun(asked))
    open_run_dir(str(tmp_path), began)
    of_machine(monkeypatch, not is_fast)
    again = settle_precision(as_begun(asked))
    check_run_dir(str(tmp_path), again)
    assert again.precision == began.precision
    open_run_dir(str(tmp_path), again)
    assert stored_config(tmp_path)["precision"] == began.precision
    other = {"bf16": "fp32", "fp32": "bf16"}[began.precision]
    with pytest.raises(BadConfig, match=f"precision: '{began.precision}' there, '{other}' now"):
        check_run_dir(str(tmp_path), root_config(asked, precision=other))


@pytest.mark.parametrize(("is_fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_engines_of_a_run_compute_in_what_is_written_down(
    is_fast: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_machine(monkeypatch, is_fast)
    config = root_config(RLConfig, server={"_target_": "s", "dtype": "auto"}, client={"dtype": "half"})
    settled = settle_precision(config)
    assert (settled.server, settled.client) == ({"_target_": "s", "dtype": dtype}, {"dtype": "half"})
