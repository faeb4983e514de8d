"""The Modal provider: the real `modal` client against a control plane on loopback."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import modal
import pytest
from grpclib import GRPCError, Status
from pydantic import SecretStr

import art_cloud as art
from art_cloud.clusters import fleet, sweep
from art_cloud.clusters.doctor import examine
from art_cloud.clusters.install import source
from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.providers.modal.options import Options, owner_tags
from art_cloud.clusters.providers.modal.sandbox import CREATED, TAG, ModalProvider
from art_cloud.clusters.registry import Registry
from art_cloud.clusters.spec import CAP_SECONDS, ClusterSpec, Instance, Offer
from art_cloud.shared.errors import ConfigError, ConflictError, LaunchError, ProviderError

from ..rigs.modal_plane import ModalPlane, modal_plane

NAME = "agent"


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalPlane]:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sweep, "PATIENCE_SECONDS", 1.0)
    with modal_plane(tmp_path, monkeypatch) as plane:
        yield plane
        assert plane.running == []


def spec(**options: str) -> ClusterSpec:
    return ClusterSpec(provider="modal", store="file:///nowhere", options={"gpu": "H100"} | options)


async def test_from_up_to_down(plane: ModalPlane, tiny_model: Path, tmp_path: Path) -> None:
    model = art.TrainableModel(name="agent", project="modal", base_model=str(tiny_model))
    store = (tmp_path / "store").as_uri()
    async with art.up("modal", name=NAME, gpu="H100", store=store) as backend:
        [sandbox] = plane.running
        assert backend.url.startswith("https://127.0.0.2:")
        await model.register(backend)
        answer = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=4,
        )
        assert answer.choices[0].message.content is not None
        async with art.connect(name=NAME) as again:
            assert again.url == backend.url
        [found] = await fleet.status()
        assert (found.name, found.provider, found.state) == (NAME, "modal", "running")
        assert found.detail.startswith(f"{sandbox.id}, by ")
        lines = [line async for line in fleet.logs(NAME)]
        assert any("listens on" in line for line in lines)
        assert backend._token not in "\n".join([*lines, *sandbox.definition.entrypoint_args])
    assert await fleet.status() == []


async def test_two_launches_give_one(
    plane: ModalPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = get_provider("modal")
    stays = {"token": SecretStr("mine"), "store": (tmp_path / "store").as_uri()}
    mine = spec().model_copy(update=stays)
    await asyncio.gather(provider.launch(mine, NAME), provider.launch(mine, NAME))
    await provider.launch(mine, NAME)
    assert [one.name for one in await provider.list()] == [NAME]

    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "another-laptop"))
    with pytest.raises(ConflictError, match="its token is not known"):
        await art.up("modal", name=NAME, gpu="H100", store="s3://bucket/prefix")
    assert Registry().list() == []
    await provider.terminate(NAME)
    assert await provider.list() == []
    await provider.terminate(NAME)


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, 24 * 3600),
        ({"deadline": 30 * 3600.0}, 24 * 3600),
        ({"deadline": 1200.0}, 600 + CAP_SECONDS),
        ({"budget": 1.0}, 600 + CAP_SECONDS),
    ],
)
async def test_a_sandbox_ends_from_outside_soon_after_budget_and_deadline(
    plane: ModalPlane, limits: dict[str, float], most: float
) -> None:
    """Whatever its server does; also one that replaces another."""
    launched_at = datetime.now(UTC) - timedelta(minutes=10)
    price = Offer(provider="modal", region="any", price_per_hour=3.0)
    limited = {"offer": price, "launched_at": launched_at, **limits}
    provider = get_provider("modal")
    await provider.launch(spec().model_copy(update=limited), NAME)
    [sandbox] = plane.running
    assert most - 60 < sandbox.definition.timeout_secs <= most
    await provider.terminate(NAME)


@pytest.mark.parametrize("options", [{}, {"serverless": True}])
async def test_two_people_with_one_default_name(
    plane: ModalPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The second one looked before there was anything, and comes to start it a moment later."""
    provider = get_provider("modal")
    options = {"gpu": "H100", **options}
    mine, _ = Registry().claim(NAME, spec().model_copy(update={"options": options}))
    await provider.launch(mine.spec, NAME)
    [running] = await provider.list()
    assert running.owner == mine.spec.owner
    secrets = dict(plane.control.environments)

    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "another-laptop"))
    with monkeypatch.context() as before:
        before.setattr(ModalProvider, "list", _nothing)
        with pytest.raises(ConflictError, match=r"started from elsewhere, by .*-at-.*name="):
            await art.up("modal", name=NAME, store=tmp_path.as_uri(), **options)
    assert Registry().list() == []
    assert [one.identity for one in await provider.list()] == [running.identity]
    assert dict(plane.control.environments) == secrets

    theirs, _ = Registry().claim(NAME, mine.spec)
    await fleet.end(theirs, ask=False)
    await provider.terminate(NAME, only=lambda one: one.identity == "another")
    assert [one.identity for one in await provider.list()] == [running.identity]
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    await fleet.down(NAME)
    assert await provider.list() == []


async def _nothing(self: ModalProvider) -> list[Instance]:
    return []


async def test_one_that_still_starts_is_not_swept_from_another_laptop(
    plane: ModalPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = get_provider("modal")
    app = await modal.App.lookup.aio("art-cloud", create_if_missing=True)
    await modal.Sandbox.create.aio(
        *("sleep", "600"),
        app=app,
        name=NAME,
        tags={TAG: NAME, CREATED: datetime.now(UTC).isoformat(), **owner_tags(spec())},
        gpu="T4",
        encrypted_ports=[8321],
        readiness_probe=modal.Probe.with_exec("false"),
    )
    [starting] = await provider.list()
    assert starting.state == "starting"
    [found], _ = await sweep.look()
    assert (found.kept or "").startswith("it was started")
    monkeypatch.setattr(sweep, "LAUNCH_SECONDS", 0.0)
    [found], _ = await sweep.look()
    assert found.kept is None
    await sweep.end([found])
    assert await provider.list() == []


async def test_its_app_is_stopped_from_outside(plane: ModalPlane) -> None:
    provider = get_provider("modal")
    await provider.launch(spec(), NAME)
    app = await modal.App.lookup.aio("art-cloud")
    await app.stop.aio()
    assert await provider.list() == []
    with pytest.raises(LaunchError, match="The server of agent ended"):
        await provider.endpoint(NAME)
    await provider.launch(spec(), NAME)
    assert [one.name for one in await provider.list()] == [NAME]
    await provider.terminate(NAME)
    assert await provider.list() == []


async def test_what_is_not_ours_is_not_listed(plane: ModalPlane) -> None:
    provider = get_provider("modal")
    assert await provider.list() == []
    app = await modal.App.lookup.aio("art-cloud", create_if_missing=True)
    other = await modal.Sandbox.create.aio("sleep", "600", app=app, gpu="T4")
    assert await provider.list() == []
    await other.terminate.aio(wait=True)


@pytest.mark.slow
async def test_a_server_that_dies_at_the_start_says_why(plane: ModalPlane, tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    with pytest.raises(LaunchError, match=r"(?s)exit code 1.*no-such-model.*start it again"):
        await art.up("modal", name=NAME, gpu="H100", store=store, base_model="no-such-model")
    assert await fleet.status() == []


@pytest.mark.slow
async def test_after_its_24_hours_a_sandbox_is_replaced(
    plane: ModalPlane, tiny_model: Path, tmp_path: Path
) -> None:
    model = art.TrainableModel(name="agent", project="modal", base_model=str(tiny_model))
    store = (tmp_path / "store").as_uri()
    async with art.up("modal", name=NAME, gpu="H100", store=store) as backend:
        await model.register(backend)
        first, groups = (await backend.info()).started_at, await some_groups(model)
        assert (await backend.train(model, groups)).step == 1
        [sandbox] = plane.running
        assert sandbox.definition.timeout_secs == 24 * 3600
        training = asyncio.create_task(backend.train(model, groups))
        await asyncio.to_thread(plane.lose, NAME, over_time=True)
        assert (await training).step == 2
        assert (await backend.info()).started_at > first
        [another] = plane.running
        assert another.definition.name == NAME
        assert await some_groups(model)
        assert await model.get_step() == 2


async def some_groups(model: art.TrainableModel[Any]) -> list[art.TrajectoryGroup]:
    async def rollout(reward: float) -> art.Trajectory:
        messages: art.Messages = [{"role": "user", "content": "hello"}]
        answer = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=4
        )
        return art.Trajectory(messages_and_choices=[*messages, answer.choices[0]], reward=reward)

    return await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(float(number)) for number in range(2))]
    )


@pytest.mark.parametrize(
    ("gpu", "near"),
    [("H1000", "H100"), ("H100:0", "H100"), ("RTX9", "Modal has no GPU 'RTX9'")],
)
async def test_a_gpu_that_is_none(plane: ModalPlane, gpu: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        await art.up("modal", name=NAME, gpu=gpu, store="s3://bucket/prefix")
    assert plane.calls["SandboxCreate"] == 0


async def test_offers() -> None:
    provider = get_provider("modal")
    [offer] = await provider.offers(spec(gpu="h100:2", region="us-east"))
    assert (offer.region, offer.price_per_hour) == ("us-east", 7.90)
    with pytest.raises(ConfigError, match=r"gpu: Field required.*Its options are: gpu, image"):
        await provider.offers(ClusterSpec(provider="modal", store="s3://bucket"))


async def test_the_image_has_this_version(plane: ModalPlane) -> None:
    provider = get_provider("modal")
    await provider.launch(spec(), NAME)
    [sandbox] = plane.running
    this = source()
    assert this.wheel is not None  # of this checkout
    assert any(f"/wheels/{this.wheel.name}" in line for line in plane.commands(sandbox))
    assert this.wheel.read_bytes() in plane.control.files.values()
    await provider.terminate(NAME)

    digest = f"registry.test/art@sha256:{64 * '0'}"
    await provider.launch(spec(image=digest), NAME)
    [sandbox] = plane.running
    assert any(digest in line for line in plane.commands(sandbox))
    await provider.terminate(NAME)


def test_every_option_has_a_row() -> None:
    page = (Path(__file__).parents[2] / "docs" / "modal.md").read_text()
    table = page[page.index("## Options") : page.index("## What happens when")]
    assert [name for name in Options.model_fields if f"`{name}`" not in table] == []


async def test_errors(plane: ModalPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = get_provider("modal")
    with pytest.raises(ConfigError, match="not-there"):
        await provider.launch(spec(image="registry.test/not-there:1"), NAME)

    monkeypatch.setattr("modal.sandbox._impl_v1._SANDBOX_SCHEDULING_TIMEOUT", 0.5)
    plane.capacity = False
    with pytest.raises(LaunchError, match="no such GPU free"):
        await provider.launch(spec(), NAME)
    plane.capacity = True
    assert await provider.list() == []

    with pytest.raises(LaunchError, match="The server of agent ended"):
        await provider.endpoint(NAME)


async def test_an_open_connection_keeps_no_sandbox(plane: ModalPlane) -> None:
    provider = get_provider("modal")
    limits = {"lease_seconds": 3.0, "token": SecretStr("a-token")}
    await provider.launch(spec().model_copy(update=limits), NAME)
    url = (await provider.endpoint(NAME)).url
    async with httpx.AsyncClient(headers={"Authorization": "Bearer a-token"}) as pool:
        assert (await pool.get(f"{url}/v1/models")).status_code == 200
        async with asyncio.timeout(60):
            while plane.running:
                await asyncio.sleep(0.05)
    assert await provider.list() == []
    [sandbox] = plane.control.sandboxes.values()
    assert sandbox.result is not None
    assert sandbox.result.exitcode == 0


async def test_sweep_ends_what_has_our_tag_and_no_server(plane: ModalPlane) -> None:
    app = await modal.App.lookup.aio("art-cloud", create_if_missing=True)
    for name, tags in (("ghost", {TAG: "ghost", CREATED: "2026-01-01T00:00:00Z"}), ("other", {})):
        await modal.Sandbox.create.aio(
            *("sleep", "600"),
            app=app,
            name=name,
            tags=tags,
            gpu="T4",
            encrypted_ports=[8321],
            readiness_probe=modal.Probe.with_exec("true"),
        )
    [found], failures = await sweep.look()
    assert (found.name, found.kept, failures) == ("ghost", None, [])
    await sweep.end([found])
    [other] = plane.running
    assert other.definition.name == "other"
    assert (await sweep.look())[0] == []
    await (await modal.Sandbox.from_name.aio("art-cloud", "other")).terminate.aio(wait=True)


async def test_a_wrong_token(plane: ModalPlane) -> None:
    plane.token = ("ak-another", "as-another")
    with pytest.raises(ConfigError, match="does not take your token"):
        await get_provider("modal").list()


async def test_no_account(plane: ModalPlane, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if "MODAL_TOKEN" not in key}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from art_cloud.cli.main import main; main()"),
        *("up", "modal", "-o", "gpu=H100", "--store", "s3://bucket/prefix"),
        env=environment | {"MODAL_CONFIG_PATH": str(tmp_path / "no-such-file")},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 1
    assert "Run `modal setup`" in " ".join(said.decode().split())
    assert Registry().list() == []
    assert plane.calls["SandboxCreate"] == 0


async def test_doctor(plane: ModalPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    async def look() -> dict[str, tuple[str, str, str]]:
        checks = await examine()
        return {one.subject: (one.state, one.message, one.cure) for one in checks}

    found = await look()
    assert found["provider modal"] == ("ok", "0 clusters run there", "")
    assert found["client of Modal"] == ("ok", f"modal {modal.__version__}", "")
    assert found["proxy token of Modal"][1].startswith("Set")

    monkeypatch.setattr(modal, "__version__", "1.99.0")
    monkeypatch.delenv("MODAL_PROXY_TOKEN_ID")
    found = await look()
    assert found["client of Modal"][::2] == ("warning", "pip install 'modal~=1.6.4'")
    assert "proxy-tokens create" in found["proxy token of Modal"][2]

    plane.token = ("ak-another", "as-another")
    found = await look()
    assert found["provider modal"][0] == "warning"
    assert "modal setup" in found["provider modal"][1]
    assert "client of Modal" not in found


async def test_a_control_plane_that_fails(plane: ModalPlane) -> None:
    provider = get_provider("modal")
    await provider.launch(spec(), NAME)
    unavailable = GRPCError(Status.UNAVAILABLE, "maintenance")
    plane.faults["SandboxListV2"] = [unavailable]
    assert [one.name for one in await provider.list()] == [NAME]
    plane.faults["SandboxListV2"] = [unavailable] * 50
    with pytest.raises(ProviderError, match=r"Could not list the sandboxes: .*maintenance"):
        await provider.list()
    plane.faults.clear()
    await provider.terminate(NAME)
