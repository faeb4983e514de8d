"""What is asked of SkyPilot, and what is said where it can't be asked."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.providers.skypilot.bridge import PYTHON, call, find_python
from art_cloud.clusters.providers.skypilot.provider import Options
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.shared.errors import ConfigError, ProviderError

PAGE = Path(__file__).parents[2] / "docs" / "skypilot.md"


@pytest.mark.parametrize(
    ("options", "resources"),
    [
        ({"gpu": "H100"}, {"accelerators": "H100"}),
        ({"gpu": "H100", "cloud": "aws"}, {"accelerators": "H100", "infra": "aws"}),
        ({"cloud": "aws", "zone": "us-east-1a"}, {"infra": "aws/*/us-east-1a"}),
        ({"region": "us-east-1"}, {"infra": "*/us-east-1"}),
        ({"image": "docker:art@sha256:0"}, {"image_id": "docker:art@sha256:0"}),
        (
            {"gpu": "H100", "spot": True},
            {"accelerators": "H100", "any_of": [{"use_spot": True}, {"use_spot": False}]},
        ),
        (
            {"spot": True, "any_of": [{"accelerators": "L4"}, {"use_spot": True}]},
            {
                "any_of": [
                    {"use_spot": True, "accelerators": "L4"},
                    {"use_spot": False, "accelerators": "L4"},
                    {"use_spot": True},
                ]
            },
        ),
    ],
)
def test_options_in_the_words_of_skypilot(
    options: dict[str, Any], resources: dict[str, Any]
) -> None:
    assert Options.model_validate(options).resources == resources


def test_every_option_has_a_row() -> None:
    table = PAGE.read_text().partition("## Options")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(Options.model_fields)


async def test_without_skypilot_its_installation_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delenv(PYTHON, raising=False)
    monkeypatch.setattr("art_cloud.clusters.providers.skypilot.bridge.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"(?s)not installed.*export {PYTHON}="):
        await get_provider("skypilot").list()
    monkeypatch.setenv(PYTHON, "/no/such/python")
    with pytest.raises(ConfigError, match="/no/such/python"):
        find_python()


async def test_a_python_without_skypilot_is_said_to_lack_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PYTHON, sys.executable)
    with pytest.raises(ProviderError, match="No module named 'sky'"):
        await call("list")


@pytest.mark.parametrize("options", [{"gpu": "H100", "colour": "red"}, {"cloud": "aws"}])
async def test_options_that_can_not_be_meant_cost_no_process(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON, "/no/such/python")
    spec = ClusterSpec(provider="skypilot", store="file:///there", options=options)
    with pytest.raises(ConfigError, match=r"colour|needs a gpu"):
        await get_provider("skypilot").offers(spec)
