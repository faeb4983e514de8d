from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import art_cloud as art
from art_cloud.clusters import doctor, fleet, providers
from art_cloud.clusters import up as cluster
from art_cloud.clusters.providers import get_provider, local
from art_cloud.clusters.providers.ssh import login as ssh_login
from art_cloud.clusters.registry import Registry, Use, home
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.shared.errors import ConfigError, NotFoundError
from art_cloud.shared.limits import parse_duration


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("2h", 7200), ("1.5d", 129600), (900, 900), (0.5, 0.5), ("7", 7)],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "15 minutes", "0m", 0, -1, "-5m", float("nan"), "m", "9" * 400]
)
def test_what_is_no_duration(text: str | float) -> None:
    with pytest.raises(ConfigError, match=r"is not a duration.*'15m'"):
        parse_duration(text)


def test_a_store_folder_means_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cluster.store_url("local", "runs") == (tmp_path / "runs").as_uri()
    assert cluster.store_url("local", "s3://bucket/art") == "s3://bucket/art"
    assert cluster.store_url("local", None) == (home() / "store").as_uri()
    with pytest.raises(ConfigError, match=r"needs a store \(store=, or --store"):
        cluster.store_url("elsewhere", None)


@pytest.mark.parametrize("store", ["s3:/oops", "s3:bucket/art", "gs:/bucket", "S3:x"])
def test_what_begins_like_a_url_is_no_folder(store: str) -> None:
    with pytest.raises(ConfigError, match=r"neither a URL nor a folder.*two slashes"):
        cluster.store_url("local", store)


@pytest.mark.parametrize("more", [{}, {"engine": "vlm"}, {"base_model": "./nothere"}])
def test_the_name_of_the_provider_comes_first(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no provider 'locl'\. Known are: .*local"):
        cluster.up("locl", **more)


def test_engine_and_folder_of_the_model_are_looked_at_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"up\(engine\): .*'transformers' or 'vllm'"):
        cluster.up("local", engine="vlm")  # type: ignore[arg-type]
    for folder in ("./nothere", "../nothere", "~/nothere", "/not/here", ""):
        with pytest.raises(ConfigError, match=f"no folder '{folder}' on this machine"):
            cluster.up("local", base_model=folder)
    (tmp_path / "tiny").mkdir()
    for name in ("tiny", "./tiny"):
        assert cluster.up("local", base_model=name)._spec.base_model == str(tmp_path / "tiny")
    elsewhere = cluster.up("ssh", base_model="/models/qwen", store="s3://bucket/art")
    assert elsewhere._spec.base_model == "/models/qwen"


def test_a_backend_that_is_not_entered_yet_says_so() -> None:
    with pytest.raises(ConfigError, match=r"no 'train'.*async with art\.up\(\.\.\.\) as backend"):
        cluster.up("local").train()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"backend = await art\.connect\(\.\.\.\)"):
        cluster.connect(name="mine").info()  # type: ignore[attr-defined]
    assert not hasattr(cluster.up("local"), "_repr_html_")


async def test_a_model_is_not_registered_with_what_is_no_backend_yet() -> None:
    model = art.TrainableModel[None](name="m", project="p", base_model="tiny")
    with pytest.raises(ConfigError, match=r"no 'register'.*async with art\.up"):
        await model.register(cluster.up("local"))  # type: ignore[arg-type]


async def test_an_unknown_provider_is_refused_before_anything_is_recorded() -> None:
    with pytest.raises(ConfigError, match=r"no provider 'moon'.*local"):
        await cluster.up("moon", store="s3://bucket")
    assert Registry().list() == []


def test_a_provider_whose_extra_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("cloudy", "no_such_sdk:CloudyProvider", providers.ENTRY_POINTS)
    monkeypatch.setattr(providers, "entry_points", lambda group: [point])
    with pytest.raises(ConfigError, match=r"no_such_sdk.*pip install 'art-cloud\[cloudy\]'"):
        get_provider("cloudy")
    with pytest.raises(ConfigError, match=r"no_such_sdk"):
        cluster.up("cloudy")  # and not of the store, which it has none of either


async def test_local_without_the_server_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_torch(name: str) -> ModuleSpec | None:
        return None if name == "torch" else find_spec(name)

    monkeypatch.setattr(local, "find_spec", without_torch)
    with pytest.raises(ConfigError, match=r"torch.*pip install 'art-cloud\[server\]'"):
        await cluster.up("local")
    assert await fleet.status() == []


async def test_doctor_warns_of_an_extra_that_a_provider_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without(*missing: str) -> Callable[[str], ModuleSpec | None]:
        return lambda name: None if name in missing else find_spec(name)

    monkeypatch.setattr(local, "find_spec", without("transformers"))
    monkeypatch.setattr(ssh_login, "find_spec", without("fabric"))
    for name, extra in (("local", "server"), ("ssh", "ssh")):
        [check] = await doctor._provider(name)
        assert check.state == "warning"
        assert f"pip install 'art-cloud[{extra}]'" in check.message


async def test_a_recorded_cluster_is_not_handed_out_as_something_else() -> None:
    spec = ClusterSpec(provider="local", store="file:///one", base_model="a/model")
    Registry().claim("mine", spec)
    launcher = Use("mine")
    with pytest.raises(ConfigError, match="store file:///one, not file:///two"):
        await cluster.up("local", name="mine", store="file:///two")
    with pytest.raises(ConfigError, match="base_model a/model, not b/model"):
        await cluster.up("local", name="mine", store="file:///one", base_model="b/model")
    assert [record.name for record in Registry().list()] == ["mine"]
    launcher.end()


async def test_a_launch_that_broke_off_is_begun_anew_but_one_that_goes_on_is_not() -> None:
    provider, registry = get_provider("local"), Registry()
    spec = ClusterSpec(provider="local", store="file:///one", budget=1)
    record, _ = registry.claim("mine", spec)
    up = cluster.up("local", name="mine")
    await up._clear(registry, provider, None)  # another program is at work on it
    await up._clear(registry, provider, record.created_at)  # it was claimed meanwhile
    assert registry.list() == [record]
    await up._clear(registry, provider, datetime.now(UTC))
    assert registry.list() == []


async def test_connect_wants_an_address_or_a_name() -> None:
    with pytest.raises(ConfigError, match="url and token"):
        cluster.connect()
    with pytest.raises(ConfigError, match="url and token"):
        cluster.connect("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="url and token"):
        cluster.connect("http://127.0.0.1:1", "token", name="mine")
    with pytest.raises(NotFoundError, match=r"no cluster 'nope'\. Known are: none"):
        await cluster.connect(name="nope")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8321", "localhost:8321", "gpu-box", "ftp://box:1", "http://", "http://b:no"]
)
def test_connect_refuses_at_once_what_can_never_answer(url: str) -> None:
    with pytest.raises(ConfigError, match=r"not the address of a server.*http://127\.0\.0\.1:8321"):
        cluster.connect(url, "token")
    with pytest.raises(ConfigError, match="not the address of a server"):
        cluster.connect("http://127.0.0.1:1", "token", inference_url=url)


async def test_a_cluster_that_never_started_is_shown_and_ended() -> None:
    Registry().claim("mine", ClusterSpec(provider="local", store="file:///one"))
    [found] = await fleet.status()
    assert (found.name, found.state) == ("mine", "stopped")
    with pytest.raises(NotFoundError, match="does not run any more"):
        await cluster.connect(name="mine")
    await fleet.down("mine")
    assert await fleet.status() == []
    with pytest.raises(NotFoundError, match="no cluster 'mine'"):
        await fleet.down("mine")


async def test_one_that_is_being_started_is_shown_as_that() -> None:
    Registry().claim("mine", ClusterSpec(provider="local", store="file:///one"))
    launcher = Use("mine")
    [found] = await fleet.status()
    assert (found.state, found.detail) == ("starting", "local is being asked for its machine")
    launcher.end()
    [found] = await fleet.status()
    assert found.state == "stopped"
    assert "its launch broke off" in found.detail


async def test_a_running_cluster_keeps_the_limits_that_it_was_started_with() -> None:
    spec = ClusterSpec(
        provider="local", store=cluster.store_url("local", None), idle_seconds=60, deadline=7200
    )
    Registry().claim("mine", spec)
    launcher = Use("mine")
    for limits, message in (
        ({"idle": "2m"}, "idle_seconds 60.0, not 120.0"),
        ({"deadline": "1h"}, "deadline 7200.0, not 3600.0"),
        ({"lease": 60}, "lease_seconds 600.0, not 60.0"),
        ({"budget": 5, "price_per_hour": 1}, "options {}, not {'price_per_hour': 1}"),
    ):
        with pytest.raises(ConfigError, match=message):
            await cluster.up("local", name="mine", **limits)
    launcher.end()


async def test_offers_of_local_cost_nothing() -> None:
    [offer] = await get_provider("local").offers(ClusterSpec(provider="local", store="s"))
    assert (offer.provider, offer.price_per_hour) == ("local", 0.0)
    for options in ({"gpu": "H100"}, {"price_per_hour": "much"}, {"price_per_hour": -1}):
        fields = {"provider": "local", "store": "s", "options": options}
        with pytest.raises(ConfigError, match="price_per_hour"):
            await get_provider("local").offers(ClusterSpec.model_validate(fields))
