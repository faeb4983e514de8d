"""Lease, idle, budget and deadline of real servers, with clocks of seconds."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest

import art_cloud as art
from art_cloud.client.http import ServerClient
from art_cloud.clusters import attached, fleet
from art_cloud.clusters.providers import get_provider
from art_cloud.shared.errors import ServerUnavailableError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import JobInfo, RegisterRequest, ServerInfo
from art_cloud.shared.wire import encode_batch
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.opening import open_store

from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import batch
from ..rigs.waiting import until, wait_until

MODEL = ModelName("limits", "agent")
PATH = f"models/{MODEL}"


def _slow_steps(seconds: float) -> None:
    """In the server: the trainer is as slow as that of a large model."""
    from art_server.training import Trainer

    real = Trainer.optim_step

    def slow(*args: object, **kwargs: object) -> object:
        time.sleep(seconds)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    Trainer.optim_step = slow  # type: ignore[assignment,method-assign]


def _steps_of_4_seconds() -> None:
    _slow_steps(4.0)


def _steps_of_many_parts() -> None:
    """In the server: a step takes longer than any test, and says all the time how far it is."""
    from art_server.training import Trainer

    def endless(*args: object, progress: Callable[[int, int], None], **kwargs: object) -> object:
        while True:
            time.sleep(0.1)
            progress(0, 1)

    Trainer.forward_backward = endless  # type: ignore[assignment,method-assign]


def _steps_that_hang() -> None:
    _slow_steps(3600.0)


def _hanging_close() -> None:
    from art_server import __main__
    from art_server.steps.runtime import Runtime

    async def hang(self: Runtime) -> None:
        time.sleep(3600)  # noqa: ASYNC251

    __main__.GRACE_SECONDS = 0.2
    __main__.CLOSING_SECONDS = 0.2
    Runtime.close = hang  # type: ignore[method-assign]


@asynccontextmanager
async def client_of(server: ServerProcess) -> AsyncIterator[ServerClient]:
    client = server.client()
    try:
        yield client
    finally:
        await client.close()


async def register(client: ServerClient, base: Path) -> None:
    request = RegisterRequest(base_model=str(base), lora=art.LoRAConfig(rank=8))
    job = JobInfo.model_validate_json(await client.call("PUT", PATH, request, call_id=uuid4().hex))
    assert [event.type async for event in client.events(job.id)][-1] == "done"


async def train(client: ServerClient) -> str:
    body = encode_batch(batch(MODEL, 1))
    sent = await client.call("POST", f"{PATH}/train", body, call_id=uuid4().hex)
    return JobInfo.model_validate_json(sent).id


async def ended(server: ServerProcess) -> int:
    return await asyncio.to_thread(server.ended)


async def keep_asking(ask: Callable[[], Awaitable[object]], server: ServerProcess) -> None:
    while server.process.is_alive():
        try:
            await ask()
        except art.ArtCloudError:
            return
        await asyncio.sleep(0.05)


async def test_a_lease_is_renewed_by_clients_and_not_by_those_who_look(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--lease", "8", "--idle", "300").start()
    async with client_of(server) as client:
        renewed_until = time.monotonic() + 9
        while time.monotonic() < renewed_until:
            await client.call("POST", "lease")
            await asyncio.sleep(0.05)
        async with server.backend(patience=0) as backend:
            clocks = {clock.name: clock for clock in (await backend.info()).clocks}
            assert clocks.keys() == {"lease", "idle"}
            assert 0 < clocks["lease"].remaining <= clocks["lease"].limit == 8
            await keep_asking(backend.info, server)
    assert await ended(server) == 0
    assert "server ends (--lease): no client asks for anything" in server.output


async def test_a_step_longer_than_the_lease_is_made_though_nobody_waits(
    tmp_path: Path, tiny_model: Path
) -> None:
    server = ServerProcess(tmp_path, "--lease", "3", "--idle", "3")
    server.prepare = _steps_of_4_seconds
    server.start()
    async with client_of(server) as client:
        await register(client, tiny_model)
        await train(client)
    assert await ended(server) == 0
    assert "server ends (--" in server.output
    assert "left for the next start" not in server.output
    assert Checkpoints(open_store(str(server.store)), MODEL).steps() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "code", "says"),
    [
        (_steps_of_many_parts, 0, "is left for the next start"),
        (_steps_that_hang, -signal.SIGKILL, "it does not come to its end: the process ends now"),
    ],
)
async def test_a_budget_holds_and_the_step_that_does_not_fit_is_made_later(
    tmp_path: Path, tiny_model: Path, prepare: Callable[[], None], code: int, says: str
) -> None:
    """Also one that can't be left: the process ends before more is spent."""
    limits = ("--budget", "16", "--price", "3600")  # a dollar a second
    server = ServerProcess(tmp_path, *limits, "--model", tiny_model)
    server.prepare = prepare
    server.start()
    async with client_of(server) as client:
        await register(client, tiny_model)
        job = await train(client)
        warned: list[str] = []

        async def ask() -> None:
            info = ServerInfo.model_validate_json(await client.call("POST", "lease"))
            [clock] = info.clocks
            assert (clock.name, clock.unit, clock.limit) == ("budget", "USD", 16)
            warned.extend(info.warnings)

        client.patience = 0
        asking = asyncio.create_task(keep_asking(ask, server))
        events = []
        try:
            async for event in client.events(job):
                events.append(event)
        except ServerUnavailableError:
            pass
        await asking
    assert await ended(server) == code
    assert "server ends (--budget): its budget of $16.00" in server.output
    assert says in server.output
    assert any("its budget of $16.00" in message for message in warned)
    assert any(event.type == "warning" and "budget" in event.data["warning"] for event in events)

    again = ServerProcess(tmp_path, "--deadline", "300")
    with again:
        async with client_of(again) as client:
            assert [event.type async for event in client.events(job)][-1] == "done"
            steps = Checkpoints(open_store(str(again.store)), MODEL)
            assert [steps.read(step).call_id for step in steps.steps()[1:]] == [job]


async def test_a_restart_does_not_start_the_budget_anew(tmp_path: Path) -> None:
    launched = ("--launched", str(time.time() - 3600))
    server = ServerProcess(tmp_path, "--budget", "2", "--price", "2", *launched).launch()
    assert await ended(server) == 0
    assert "its budget or its deadline allows is over" in server.output
    assert "it was launched 1 h" in server.output


async def test_a_clock_that_is_behind_does_not_start_the_budget_anew(tmp_path: Path) -> None:
    """A server whose clock is hours behind that of the laptop, which knows what was spent."""
    told = ("--launched", str(time.time() + 7200), "--spent", "3600")
    server = ServerProcess(tmp_path, "--budget", "2", "--price", "2", *told).launch()
    assert await ended(server) == 0
    assert "its budget or its deadline allows is over" in server.output


async def test_an_end_that_hangs_is_an_end(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path)
    server.prepare = _hanging_close
    server.start()
    server.process.terminate()
    assert await ended(server) == -signal.SIGKILL
    assert "it does not come to its end: the process ends now" in server.output


def _slow_boot() -> None:
    from art_server.steps.programs import Programs

    real = Programs.reopen

    async def slow(self: Programs, *args: object) -> None:
        await asyncio.sleep(5)
        await real(self, *args)  # type: ignore[arg-type]

    Programs.reopen = slow  # type: ignore[assignment,method-assign]


async def test_a_boot_that_takes_longer_than_lease_and_idle_is_no_end(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--lease", "4", "--idle", "4")
    server.prepare = _slow_boot
    server.start()
    async with client_of(server) as client:
        info = ServerInfo.model_validate_json(await client.call("POST", "lease"))
    assert {clock.name for clock in info.clocks} == {"lease", "idle"}
    assert await ended(server) == 0
    assert "server ends (--lease)" in server.output


def _hanging_boot() -> None:
    from art_server import __main__
    from art_server.steps.programs import Programs

    async def hang(self: Programs, *args: object) -> None:
        time.sleep(3600)  # noqa: ASYNC251

    __main__.BOOT_SECONDS = 2
    Programs.reopen = hang  # type: ignore[method-assign]


def _hanging_loop() -> None:
    from art_server.api.app import Routes

    async def hang(self: Routes, *args: object) -> None:
        time.sleep(3600)  # noqa: ASYNC251

    Routes.checkpoints = hang  # type: ignore[assignment,method-assign]


def _hanging_engine() -> None:
    from art_server.inference.transformers.scheduler import Scheduler

    Scheduler._decode_step = lambda self: time.sleep(3600)  # type: ignore[method-assign]


async def test_a_boot_that_hangs_is_given_up(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path)
    server.prepare = _hanging_boot
    server.launch()
    assert await ended(server) == -signal.SIGKILL
    assert "it does not come up: the process ends now" in server.output
    assert "in hang" in server.output  # where it was


STALL = ("--stall", "8", "--lease", "300", "--idle", "300")


async def test_a_server_that_is_stopped_for_good_ends(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, *STALL).start()
    os.kill(server.pid, signal.SIGSTOP)
    assert await ended(server) == -signal.SIGKILL
    assert "its event loop has not moved for 8 s: the process ends now (it was stopped)" in (
        server.output
    )


async def test_a_stopped_server_ends_as_the_first_process_of_a_container_too(
    tmp_path: Path,
) -> None:
    """Which nothing within the container can kill."""
    state = tmp_path / "state"
    container = await asyncio.create_subprocess_exec(
        *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"),
        *(sys.executable, "-m", "art_server", *STALL),
        *("--state", str(state), "--store", str(tmp_path / "store")),
        env=os.environ | {"ART_CLOUD_TOKEN": "t"},
    )
    await until((state / "endpoint.json").exists)
    [first] = psutil.Process(container.pid).children()
    [server] = first.children()
    server.suspend()
    assert await container.wait() == 128 + signal.SIGKILL


async def test_an_event_loop_that_hangs_ends_the_server(tmp_path: Path, tiny_model: Path) -> None:
    server = ServerProcess(tmp_path, *STALL)
    server.prepare = _hanging_loop
    server.start()
    async with client_of(server) as client:
        await register(client, tiny_model)
        asking = asyncio.create_task(client.call("GET", f"{PATH}/checkpoints"))
        assert await ended(server) == -signal.SIGKILL
        asking.cancel()
        await asyncio.wait([asking])
    assert "its event loop has not moved for 8 s: the process ends now" in server.output
    assert "in hang" in server.output


async def test_a_trainer_that_hangs_ends_the_server_though_clients_ask(
    tmp_path: Path, tiny_model: Path
) -> None:
    server = ServerProcess(tmp_path, *STALL)
    server.prepare = _steps_that_hang
    server.start()
    async with client_of(server) as client:
        await register(client, tiny_model)
        job = await train(client)
        client.patience = 0
        await keep_asking(lambda: client.call("POST", "lease"), server)
    assert await ended(server) == -signal.SIGKILL
    assert f"the train of {MODEL} (call {job}) has not moved for" in server.output
    assert "in slow" in server.output


async def test_an_engine_that_hangs_ends_the_server(tmp_path: Path, tiny_model: Path) -> None:
    server = ServerProcess(tmp_path, *STALL, "--model", tiny_model)
    server.prepare = _hanging_engine
    server.start()
    async with server.http() as http:
        body = {"model": str(tiny_model), "prompt": "x", "max_tokens": 5}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        assert await ended(server) == -signal.SIGKILL
        with pytest.raises(httpx.HTTPError):
            await asking
    assert "what is sampled has not moved for" in server.output


@pytest.mark.slow
async def test_what_moves_may_take_longer_than_what_stalls(
    tmp_path: Path, tiny_model: Path
) -> None:
    """A step of parts that are shorter than `--stall`, and are more in all."""
    server = ServerProcess(tmp_path, *STALL, "--deadline", "30")
    server.prepare = _steps_of_many_parts
    server.start()
    async with client_of(server) as client:
        await register(client, tiny_model)
        job = await train(client)
    assert await ended(server) == 0
    assert f"job {job} (train of {MODEL}) is left for the next start" in server.output


def _dying_engine() -> None:
    from art_server.inference.transformers.scheduler import Scheduler

    def die(self: Scheduler) -> None:
        raise SystemExit("the end")

    Scheduler._decode_step = die  # type: ignore[method-assign]


async def test_an_engine_that_is_dead_for_good_ends_the_server(
    tmp_path: Path, tiny_model: Path
) -> None:
    server = ServerProcess(tmp_path, "--model", tiny_model)
    server.prepare = _dying_engine
    server.start()
    async with server.http() as http:
        body = {"model": str(tiny_model), "prompt": "x", "max_tokens": 5}
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 500
    assert "The inference engine died of SystemExit" in answer.json()["error"]["message"]
    assert await ended(server) == 1
    assert "art-server: The inference engine died of SystemExit" in server.output


async def test_a_watchdog_that_is_killed_is_replaced(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, *STALL).start()
    [first] = psutil.Process(server.pid).children()
    first.kill()
    await asyncio.to_thread(
        wait_until, lambda: "the watchdog was gone, and is started again" in server.output, 30
    )
    os.kill(server.pid, signal.SIGSTOP)
    assert await ended(server) == -signal.SIGKILL


async def test_the_watchdog_goes_with_its_server_and_holds_nothing_of_it(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path).start()
    [watchdog] = psutil.Process(server.pid).children()
    await asyncio.to_thread(wait_until, lambda: watchdog.num_fds() == 3, 30)
    server.kill()
    await asyncio.to_thread(wait_until, lambda: not watchdog.is_running(), 30)


@pytest.mark.slow
async def test_who_is_attached_is_warned_once_and_nothing_is_relaunched_beyond_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ART_PROGRESS", "1")
    monkeypatch.setattr(attached, "PING_SECONDS", 0.1)
    async with art.up("local", name="short", deadline="40s", price_per_hour=36) as backend:
        while await get_provider("local").list():
            await asyncio.sleep(0.1)
        with pytest.raises(ServerUnavailableError, match="its deadline allowed is over"):
            await backend.info()
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("s: its deadline of 40 s") == 2  # at a fifth and at a twentieth
    assert "at $36.00 an hour, 0 steps" in said
    assert await fleet.status() == []
