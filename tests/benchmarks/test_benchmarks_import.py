"""Benchmarks run seldom: what they import is there all the same."""

import importlib
import pkgutil

import pytest

import benchmarks

MODULES = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


def test_every_benchmark_can_be_imported() -> None:
    assert "benchmarks.rl.rl_faults" in MODULES
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != "trl":  # of an environment of its own
                pytest.fail(f"{name}: {error}")
