"""What is installed on machines is pinned, to versions that art-cloud takes."""

from __future__ import annotations

from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from art_cloud.clusters.install import extras, lock


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_every_requirement_is_pinned_within_its_range(engine: str) -> None:
    lines = lock(engine).read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    for asked in map(Requirement, requires("art-cloud") or []):
        wanted = ["", *extras(engine).split(",")]
        if asked.marker and not any(asked.marker.evaluate({"extra": extra}) for extra in wanted):
            continue
        found = [pin for pin in pins if pin.name == asked.name]
        assert found, asked
        for pin in found:
            [version] = pin.specifier
            assert (version.operator, asked.specifier.contains(version.version)) == ("==", True)
