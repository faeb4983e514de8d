"""The local provider with the real server: started, found again, killed, ended; nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner, Result

import art_cloud as art
from art_cloud.cli.main import app
from art_cloud.clusters import fleet
from art_cloud.clusters.providers import get_provider, local
from art_cloud.clusters.registry import Registry, home
from art_cloud.shared.errors import AuthError, ConfigError, ConflictError, LaunchError
from art_cloud.shared.processes import MARK

from ..rigs.server_process import ServerProcess, show_as
from ..rigs.waiting import until

SERVER = [sys.executable, "-m", "art_server", "--idle", "300"]


@pytest.fixture(autouse=True)
async def cluster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """A home of the test's own; at its end no process of it may be left."""
    home = tmp_path / "home"
    monkeypatch.setenv("ART_CLOUD_HOME", str(home))
    yield home
    left = processes_of(home)
    for process in left:
        process.kill()
    assert left == []


def processes_of(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(home) in part for part in process.info["cmdline"] or []):
            found.append(process)
    return found


async def pid_of(name: str) -> int:
    [instance] = [one for one in await get_provider("local").list() if one.name == name]
    return int(instance.detail.removeprefix("pid "))


async def test_from_up_to_down(
    tiny_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_PROGRESS", "1")
    async with art.up("local", name="one", base_model=str(tiny_model), idle="5m") as backend:
        assert (await backend.info()).base_model == str(tiny_model)
        phases = capfd.readouterr().err
        for phase in ("provision", "boot", "model load", "first token"):
            assert f"one: {phase}, " in phases

        async with art.up("local", name="one") as again:
            assert again.url == backend.url
        stays = "one stays, it ran before this program. It ends by itself after 10 m without a"
        assert stays in capfd.readouterr().err.replace("\n", " ")
        async with art.connect(name="one") as third:
            assert third.url == backend.url
        with pytest.raises(AuthError):
            await art.connect(backend.url, "a wrong token")
        with pytest.raises(ConfigError, match=r"with base_model .*, not another/model"):
            await art.up("local", name="one", base_model="another/model")

        [found] = await fleet.status()
        assert (found.name, found.state, found.recorded) == ("one", "running", True)
        assert found.server is not None
        [record] = Registry().list()
        assert record.state == "running"
        lines = [line async for line in fleet.logs("one")]
        assert any(backend.url in line for line in lines)
        token = record.spec.token.get_secret_value()
        process = psutil.Process(await pid_of("one"))
        assert token not in "\n".join([*lines, *process.cmdline()])
        assert process.pid == os.getpgid(process.pid) == os.getsid(process.pid)

    assert await fleet.status() == []
    assert not psutil.pid_exists(process.pid) or process.status() == psutil.STATUS_ZOMBIE
    assert any("stopped" in line for line in [line async for line in fleet.logs("one")])


async def test_one_that_another_program_uses_stays_until_down(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with art.up("local", name="shared") as backend:
        other = await art.connect(name="shared")
    assert "shared stays, another program uses it" in capfd.readouterr().err
    assert (await other.info()).version == art.__version__
    await other.close()

    # the same server, found again by a second `up`, is not ended with the second block
    async def join(joined: asyncio.Event) -> None:
        async with art.up("local", name="shared") as again:
            assert again.url == backend.url
            joined.set()
            await asyncio.Event().wait()

    joined = asyncio.Event()
    joining = asyncio.create_task(join(joined))
    await asyncio.wait([joining, asyncio.create_task(joined.wait())], return_when="FIRST_COMPLETED")
    joining.cancel()  # what Ctrl-C does to a script
    with pytest.raises(asyncio.CancelledError):
        await joining
    said = capfd.readouterr().err
    assert f"Interrupted. The steps made so far are in {(home() / 'store').as_uri()}; " in said
    assert "shared stays, it ran before this program. It ends by itself after 10 m without" in said
    assert [one.state for one in await fleet.status()] == ["running"]

    following = asyncio.create_task(_collect(fleet.logs("shared", follow=True)))
    await fleet.down("shared")
    assert any("stopped" in line for line in await following)


async def _collect(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines]


async def art_cloud(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


async def test_the_commands(cluster_home: Path) -> None:
    started = json.loads((await art_cloud("up", "--name", "one", "--json")).stdout)
    assert started["name"] == "one"
    assert started["store"] == (cluster_home / "store").as_uri()
    assert "token" not in started
    told = await art_cloud("up", "--name", "one", "--json", "--show-token")
    token = json.loads(told.stdout)["token"]
    async with art.connect(started["url"], token) as backend:
        assert (await backend.info()).store == started["store"]
    shown = await art_cloud("up", "--name", "one")
    assert 'art.connect(name="one")' in shown.stdout
    assert token not in shown.output
    assert token in (await art_cloud("up", "--name", "one", "--show-token")).stdout

    one = json.loads((await art_cloud("status", "one", "--json")).stdout)
    assert (one["name"], one["state"], one["server"]["engine"]) == (
        "one",
        "running",
        "transformers",
    )
    assert token not in json.dumps(one)
    assert "running" in (await art_cloud("status")).stdout
    assert started["url"] in (await art_cloud("logs", "one")).stdout
    listed = await art_cloud("checkpoints", "ls", "games/agent", "--name", "one", "--json")
    assert (listed.exit_code, json.loads(listed.stdout)) == (0, [])
    ended = (await art_cloud("down", "--all", "--yes")).stdout.splitlines()
    assert ended[0] == "Ended one."
    assert ended[1].endswith("0 steps, 0 tokens sampled, 0 trained on")
    assert started["url"] in (await art_cloud("logs", "one")).stdout


async def test_a_server_that_dies_at_the_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    missing = tmp_path / "no-model"
    missing.mkdir()
    with pytest.raises(LaunchError) as caught:
        await art.up("local", name="one", base_model=str(missing))
    message = str(caught.value)
    assert "ended with exit code 1. The last lines of" in message
    assert str(missing) in message.partition("The last lines of")[2]
    assert Registry().list() == []
    assert await get_provider("local").list() == []


async def test_a_killed_server_is_shown_as_stopped_and_started_again() -> None:
    backend = await art.up("local", name="one")
    await backend.close()
    psutil.Process(await pid_of("one")).kill()
    while await get_provider("local").list():
        await asyncio.sleep(0.05)
    [found] = await fleet.status()
    assert (found.state, found.server) == ("stopped", None)
    assert "art-cloud logs one" in found.detail

    async with art.up("local", name="one") as again:
        assert again.url != backend.url
        [found] = await fleet.status()
        assert found.state == "running"
    assert await fleet.status() == []


async def test_a_server_that_nobody_recorded_is_shown_and_ended(cluster_home: Path) -> None:
    arguments = [*SERVER, "--name", "stray", "--state", str(cluster_home / "clusters" / "stray")]
    stray = await asyncio.create_subprocess_exec(
        *arguments, env=os.environ | {"ART_CLOUD_TOKEN": "t"}
    )
    await until_listed("stray")
    [found] = await fleet.status()
    assert (found.name, found.recorded) == ("stray", False)
    with pytest.raises(ConflictError, match="not recorded here"):
        await art.up("local", name="stray")
    assert stray.returncode is None
    await fleet.down("stray")
    # the server shares this test's session: nothing else of that was ended
    assert await stray.wait() in (0, -signal.SIGTERM)


async def until_listed(name: str) -> None:
    async with asyncio.timeout(60):
        while all(one.name != name for one in await get_provider("local").list()):
            await asyncio.sleep(0.05)


async def test_what_ignores_the_signal_is_killed_with_all_that_it_started(
    cluster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*SERVER, "--name", "stuck", "--state", str(cluster_home / "clusters" / "stuck")]
    server = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        "sleep 300 & echo $!; exec " + " ".join(arguments),
        env=os.environ | {"ART_CLOUD_TOKEN": "t"},
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    child = psutil.Process(int(await server.stdout.readline()))
    endpoint = cluster_home / "clusters" / "stuck" / "endpoint.json"
    async with asyncio.timeout(120):
        while not endpoint.exists():  # from then on it hears signals
            await asyncio.sleep(0.05)
    os.kill(server.pid, signal.SIGSTOP)
    monkeypatch.setattr(local, "ENDING_SECONDS", 0.2)
    await get_provider("local").terminate("stuck")
    assert await server.wait() == -signal.SIGKILL
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def _lead_a_session(folder: Path) -> None:
    """In a server: as the provider starts it, with a process that it has started itself."""
    show_as("art-server", "--state", str(folder / "clusters" / "asleep"))
    os.setsid()
    child = subprocess.Popen(["sleep", "300"])
    (folder / "child").write_text(str(child.pid))


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (["--stall", "5"], "its event loop has not moved for 5 s"),
        pytest.param(["--deadline", "40"], "its money or its time is up", marks=pytest.mark.slow),
    ],
)
async def test_one_that_is_suspended_for_good_ends_with_all_that_it_started(
    cluster_home: Path, limits: list[str], says: str
) -> None:
    server = ServerProcess(cluster_home, "--name", "asleep", *limits)
    server.state = cluster_home / "clusters" / "asleep"
    server.prepare = partial(_lead_a_session, cluster_home)
    await asyncio.to_thread(server.start)  # a fork: it listens long before the deadline
    child = psutil.Process(int((cluster_home / "child").read_text()))
    assert os.getsid(child.pid) == server.pid
    os.kill(server.pid, signal.SIGSTOP)
    assert await asyncio.to_thread(server.ended) == -signal.SIGKILL
    assert says in server.output
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert await get_provider("local").list() == []


async def test_what_a_killed_server_leaves_running_is_found_and_ended(cluster_home: Path) -> None:
    state = cluster_home / "clusters" / "gone"
    arguments = [*SERVER, "--name", "gone", "--state", str(state)]
    server = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        "sleep 300 & exec " + " ".join(arguments),
        env=os.environ | {"ART_CLOUD_TOKEN": "t", MARK: uuid4().hex},
        start_new_session=True,
    )
    await until((state / "endpoint.json").exists)
    server.kill()
    await server.wait()
    [found] = await get_provider("local").list()
    assert (found.name, found.state) == ("gone", "ending")
    child = psutil.Process(int(found.detail.removeprefix("pid ")))
    await fleet.down("gone")
    assert await get_provider("local").list() == []
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_a_stale_file_makes_nobody_elses_processes_ours(cluster_home: Path) -> None:
    """A server was killed, or lost in a reboot; its id is now that of a stranger's session, whose
    leader has gone, as of `nohup x &` in a terminal that was closed."""
    stranger = await asyncio.create_subprocess_exec(
        *("bash", "-c", "sleep 3000 > /dev/null & echo $!"),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert stranger.stdout is not None
    child = psutil.Process(int(await stranger.stdout.readline()))
    await stranger.wait()
    assert os.getsid(child.pid) == stranger.pid
    folder = cluster_home / "clusters" / "gone"
    folder.mkdir(parents=True)
    mark = uuid4().hex
    wrote = {"name": "gone", "url": "http://127.0.0.1:9", "pid": stranger.pid, "mark": mark}
    process = f"another-boot/{stranger.pid}/7"
    (folder / "endpoint.json").write_text(json.dumps(wrote | {"process": process}))
    session = {"owner": "o", "session": stranger.pid, "process": process, "mark": mark}
    (folder / "session.json").write_text(json.dumps(session))
    try:
        assert await get_provider("local").list() == []
        await get_provider("local").terminate("gone")
        assert (await art_cloud("sweep", "--yes")).exit_code == 0
        async with art.up("local", name="gone"):  # and no stale file is in the way
            assert child.is_running()
        assert child.is_running()
    finally:
        child.kill()


async def test_a_stale_file_with_the_id_of_a_server_that_still_boots(cluster_home: Path) -> None:
    state = cluster_home / "clusters" / "slow"
    state.mkdir(parents=True)
    arguments = [*SERVER, "--name", "slow", "--state", str(state), "--model", "/no/such/model"]
    server = await asyncio.create_subprocess_exec(
        *("bash", "-c", "read go; exec " + " ".join(arguments)),
        env=os.environ | {"ART_CLOUD_TOKEN": "t"},
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    wrote = {"url": "http://127.0.0.1:9", "pid": server.pid, "process": f"a-boot/{server.pid}/7"}
    (state / "endpoint.json").write_text(json.dumps(wrote))
    assert server.stdin is not None
    server.stdin.write(b"\n")
    await until_listed("slow")
    [found] = await get_provider("local").list()
    assert found.state == "starting"
    await get_provider("local").terminate("slow")
    await server.wait()


async def test_only_the_one_that_was_meant_is_ended() -> None:
    provider = get_provider("local")
    await (await art.up("local", name="one")).close()
    [seen] = await provider.list()
    [record] = Registry().list()
    assert seen.owner == record.spec.owner
    psutil.Process(await pid_of("one")).kill()
    await until_gone("one")
    await (await art.up("local", name="one")).close()
    [another] = await provider.list()
    assert another.identity != seen.identity
    await provider.terminate("one", only=lambda instance: instance.identity == seen.identity)
    assert await provider.list() == [another]
    with pytest.raises(ConflictError, match="another token"):
        await provider.launch(record.spec.model_copy(update={"token": SecretStr("x")}), "one")
    assert await provider.list() == [another]
    await fleet.down("one")
    assert await provider.list() == []


async def until_gone(name: str) -> None:
    async with asyncio.timeout(60):
        while any(one.name == name for one in await get_provider("local").list()):
            await asyncio.sleep(0.05)


async def test_ctrl_c_while_it_starts_ends_what_was_started(cluster_home: Path) -> None:
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from art_cloud.cli.main import main; main()"
    )
    starting = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, "up", "--name", "one", stderr=asyncio.subprocess.PIPE
    )
    await until(lambda: any("art_server" in p.cmdline() for p in processes_of(cluster_home)))
    starting.send_signal(signal.SIGINT)
    _, errors = await starting.communicate()
    assert starting.returncode == 130
    assert errors.decode().endswith("Nothing is left running.\n")
    assert await fleet.status() == []


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = await asyncio.create_subprocess_exec(
            *SERVER,
            *("--port", str(port), "--state", str(tmp_path / "state")),
            env=os.environ | {"ART_CLOUD_TOKEN": "t"},
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await server.communicate()
    assert server.returncode == 1
    assert f"Port {port} on 127.0.0.1 can't be used" in errors.decode()
