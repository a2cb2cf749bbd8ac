"""Pins what the environment may say, and that the README says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workbench.errors import ArgumentError
from workbench.settings import VARIABLES, Settings

README = Path(__file__).parent.parent / "README.md"


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.read({}) == Settings(
        device=None, fusion=True, custom_all_reduce=True, multicast=False, timeout_s=60.0
    )


def test_every_variable_is_read() -> None:
    env = {
        "WORKBENCH_DEVICE": "cpu",
        "WORKBENCH_FUSION": "0",
        "WORKBENCH_CUSTOM_ALL_REDUCE": "0",
        "WORKBENCH_MULTICAST": "1",
        "WORKBENCH_SHARE_GPUS": "1",
        "WORKBENCH_CHECK": "1",
        "WORKBENCH_TEST": "1",
        "WORKBENCH_TIMEOUT_S": "2.5",
        "WORKBENCH_TRACE_DIR": "/tmp/t",
    }
    assert env.keys() == VARIABLES.keys()
    assert Settings.read(env) == Settings(
        device="cpu",
        fusion=False,
        custom_all_reduce=False,
        multicast=True,
        share_gpus=True,
        check=True,
        test=True,
        timeout_s=2.5,
        trace_dir="/tmp/t",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKBENCH_DEVICE", "gpu"),
        ("WORKBENCH_FUSION", "no"),
        ("WORKBENCH_TIMEOUT_S", "soon"),
        ("WORKBENCH_TIMEOUT_S", "0"),
        ("WORKBENCH_TIMEOUT_S", "-1"),
        ("WORKBENCH_TIMEOUT_S", "nan"),
        ("WORKBENCH_TIMEOUT_S", "inf"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}='{value}'; allowed"):
        Settings.read({name: value})


def test_the_readme_lists_every_variable() -> None:
    assert set(re.findall(r"`(WORKBENCH_[A-Z_]+)` \|", README.read_text())) == VARIABLES.keys()
