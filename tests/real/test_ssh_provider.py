"""The ssh provider over a real sshd, whose logins have a home of their own: the box."""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

import art_cloud as art
from art_cloud.cli.main import app
from art_cloud.clusters import fleet, sweep
from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.providers.ssh import provider as ssh
from art_cloud.clusters.providers.ssh.hosts import Options, default_hosts
from art_cloud.clusters.providers.ssh.login import login
from art_cloud.clusters.registry import Registry
from art_cloud.shared.errors import ConfigError, ConflictError, NoMachineError, ProviderError
from art_cloud.shared.processes import identity_of

from ..rigs.s3_servers import S3Server, moto_server
from ..rigs.ssh_box import Box, empty_at_the_end, spec
from ..rigs.sshd import needs_sshd
from ..rigs.uv_settings import uv_settings
from ..rigs.waiting import until

pytestmark = needs_sshd
ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch" / "ssh"
BOOT = identity_of(os.getpid())


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with empty_at_the_end(Box(tmp_path / "box")) as box:
        yield box


async def art_cloud(*arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


# ---------------------------------------------------------------- from a box to a trained agent


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with moto_server(tmp_path / "s3") as server:
        server.use(monkeypatch)
        yield server


async def test_an_agent_is_trained_on_a_box(s3: S3Server, tmp_path: Path, tiny_model: Path) -> None:
    """Its credentials are those that this machine makes for it: the box has none of its own."""
    store = f"s3://{s3.make_bucket()}/art"
    with Box(tmp_path / "box", f"AWS_CA_BUNDLE={s3.ca}") as box:
        await train_and_look(box, store, str(tiny_model))
        assert box.processes() == []
        for path in box.home.rglob("*"):
            assert not path.is_file() or s3.secret_key.encode() not in path.read_bytes()


async def train_and_look(box: Box, store: str, base_model: str) -> None:
    model = art.TrainableModel(name="agent", project="tests", base_model=base_model)
    async with art.up("ssh", name="one", store=store, **box.asked) as backend:
        assert (await backend.info()).store == store
        await model.register(backend)
        client = model.openai_client()
        answer = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=[{"role": "user", "content": "1"}],
            max_tokens=4,
            n=2,
        )
        question: art.Messages = [{"role": "user", "content": "1"}]
        group = art.TrajectoryGroup(
            art.Trajectory(messages_and_choices=[*question, choice], reward=float(number))
            for number, choice in enumerate(answer.choices)
        )
        assert (await backend.train(model, [group])).step == 1

        box.kill_sessions()  # the server outlives the login that started it
        [found] = await fleet.status()
        assert (found.state, found.recorded) == ("running", True)
        assert found.detail.startswith("gpu-box, pid ")
        assert "art-server" in await art_cloud("logs", "one")
        await check_a_command_on_the_machine(box)
        await check_the_tunnel_of_the_command_line(box)

        [server] = [one for one in box.processes() if "art_server" in one.cmdline()]
        os.killpg(server.pid, signal.SIGKILL)  # the machine is lost, with its disk
        shutil.rmtree(box.home / ".art-cloud" / "clusters" / "one")
        assert (await backend.train(model, [group])).step == 2
    assert await fleet.status() == []


async def check_a_command_on_the_machine(box: Box) -> None:
    program = (sys.executable, "-c", "from art_cloud.cli.main import main; main()")
    process = await asyncio.create_subprocess_exec(
        *(*program, "ssh", "one", "echo $HOME; exit 7"), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert (said.decode(), process.returncode) == (f"{box.home}\n", 7)


async def until_answered(client: httpx.AsyncClient) -> None:
    """What was on its way when the login was lost is cut; the next one works."""
    while True:
        with suppress(httpx.TransportError):
            assert (await client.get("/art/v1/server")).status_code == 401
            return


async def check_the_tunnel_of_the_command_line(box: Box) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from art_cloud.cli.main import main; main()", "tunnel", "one"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        assert (await client.get("/art/v1/server")).status_code == 401
        box.kill_sessions()
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        await until_answered(client)
    process.send_signal(signal.SIGINT)
    _, said = await process.communicate()
    assert process.returncode == 130
    assert b"connected, 0 reconnects. It stays until Ctrl-C" in said
    assert b"connected, 1 reconnects" in said


@pytest.mark.slow
async def test_all_of_it_is_installed_in_an_empty_home(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_PROGRESS", "1")
    with Box(tmp_path / "box", *uv_variables()) as box:
        options = {key: value for key, value in box.asked.items() if key != "python"}
        record, _ = Registry().claim("one", spec(options, store=(tmp_path / "store").as_uri()))
        provider = get_provider("ssh")
        await provider.launch(record.spec, "one")
        said = capfd.readouterr().err
        assert "installing art-cloud[server]" in said
        [python] = (box.home / ".art-cloud" / "envs").glob("*/bin/python")
        [server] = [one for one in box.processes() if "art_server" in one.cmdline()]
        assert server.cmdline()[0] == str(python)
        scripts = python.parent.parent.glob("lib/*/site-packages/art_cloud/launch/ssh/*.py")
        assert {path.name for path in scripts} == {"prepare.py", "servers.py"}
        await provider.endpoint("one")
        await provider.terminate("one")

        async with login(box.route) as there:  # once
            [key] = (await there.run("prepare.py", "check"))["environments"]
            again = await there.run("prepare.py", "install", key, "no-such-requirement")
            assert again == {"python": str(python)}
            with pytest.raises(ProviderError, match=r"(?s)gpu-box: .*install.*failed:.*such.whl"):
                await there.run(
                    "prepare.py", "install", "other", "not-a-package @ file:///no/such.whl"
                )
        assert box.processes() == []


def uv_variables() -> list[str]:
    programs = Path(sys.executable).parent
    settings = uv_settings() | {"PATH": f"{programs}:{os.environ['PATH']}"}  # where uv is
    return [f"{name}={value}" for name, value in settings.items()]


# ---------------------------------------------------------------- which box


@pytest.fixture
def pool(box: Box, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Options with three hosts, of which the first is off and the others are one box each."""
    with Box(tmp_path / "other") as other:
        config = tmp_path / "pool_config"
        off = "Host off\n  HostName 127.0.0.1\n  Port 1\n"
        first = box.config.read_text().replace("Host gpu-box", "Host first")
        second = other.config.read_text().replace("Host gpu-box", "Host second")
        config.write_text(off + first + second)
        yield {
            "hosts": ["off", "first", "second"],
            "ssh_config": str(config),
            "python": sys.executable,
        }
        assert other.processes() == []


async def test_the_first_box_that_answers_and_is_free_is_taken(
    pool: dict[str, Any],
) -> None:
    provider = get_provider("ssh")
    assert [offer.region for offer in await provider.offers(spec(pool))] == pool["hosts"]
    places = {}
    for name in ("one", "two"):
        record, _ = Registry().claim(name, spec(pool))
        await provider.launch(record.spec, name)
        await provider.launch(record.spec, name)  # finds it where it is
    record, _ = Registry().claim("three", spec(pool))
    with pytest.raises(NoMachineError) as caught:
        await provider.launch(record.spec, "three")
    for reason in (
        "off refuses ssh connections",
        "first has a server already: one",
        "second has a server",
    ):
        assert reason in str(caught.value)

    with pytest.raises(art.IncompleteListError, match=r"off refuses ssh connections") as incomplete:
        await provider.list()
    places = {one.name: one.detail.split(",")[0] for one in incomplete.value.instances}
    assert places == {"one": "first", "two": "second"}
    sure, _ = Registry().claim("four", spec({**pool, "hosts": ["first"]}))
    Registry().set_state(sure, "running")
    states = {one.name: one.state for one in await fleet.status()}
    expected = {"one": "starting", "two": "starting", "three": "unknown", "four": "stopped"}
    assert states == expected
    assert [line async for line in provider.logs("two", follow=False)] == []
    for name in ("one", "two"):
        await provider.terminate(name)
    with pytest.raises(ProviderError, match=r"off refuses ssh connections.*three"):
        await provider.terminate("three")

    refused = await asyncio.to_thread(CliRunner().invoke, app, ["down", "four", "--forget"])
    assert "four needs no forgetting" in refused.output
    assert "Forgot three." in await art_cloud("down", "three", "--forget")
    assert {one.name for one in await fleet.status()} == {"one", "two", "four"}


async def test_hosts_from_a_file(tmp_path: Path) -> None:
    provider = get_provider("ssh")
    with pytest.raises(ConfigError, match=r"needs a machine: host=.*ssh-hosts"):
        await provider.offers(spec({}))
    hosts = tmp_path / "boxes.txt"
    hosts.write_text("# mine\ngpu-box  # in the cellar\n\nother\n")
    offers = await provider.offers(spec({"hosts_file": str(hosts), "price_per_hour": 2.5}))
    assert [(one.region, one.price_per_hour) for one in offers] == [
        ("gpu-box", 2.5),
        ("other", 2.5),
    ]
    default_hosts().parent.mkdir(parents=True)
    default_hosts().write_text("gpu-box\n")
    assert [one.region for one in await provider.offers(spec({}))] == ["gpu-box"]
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        await provider.offers(spec({"hosts_file": "/no/such/file"}))
    with pytest.raises(ConfigError, match="'-oProxyCommand=x' is not a host"):
        await provider.offers(spec({"host": "-oProxyCommand=x"}))
    with pytest.raises(ConfigError, match=r"price_per_hour.* greater than or equal to 0"):
        await provider.offers(spec({"host": "gpu-box", "price_per_hour": -1}))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gpu": "H100"}, r"gpu-box shows no GPU H100: it has none"),
        ({"min_memory_gb": 1e6}, r"gpu-box has .* GB of memory left, and 1e\+06 are asked for"),
        ({"python": "/no/python"}, "gpu-box: /no/python: No such file"),
        ({"python": "/usr/bin/python3"}, r"gpu-box: /usr/bin/python3 has no art-cloud\[server\]"),
    ],
)
async def test_a_box_that_does_not_fit_says_why(
    box: Box, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(NoMachineError, match=message):
        await get_provider("ssh").launch(spec({**box.asked, **option}), "one")


async def test_a_host_that_there_is_not_leaves_nothing_recorded(box: Box) -> None:
    asked = {**box.asked, "host": "no-such-host.invalid"}
    with pytest.raises(NoMachineError, match=r"address of no-such-host\.invalid can.t be found"):
        await art.up("ssh", name="one", store="file:///of/the/box", **asked)
    assert Registry().list() == []


async def test_one_that_another_started_is_left_alone(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = get_provider("ssh")
    record, _ = Registry().claim("one", spec(box.asked))
    await provider.launch(record.spec, "one")

    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "another laptop"))
    with pytest.raises(ConflictError, match="one runs on gpu-box that was started from elsewhere"):
        await art.up("ssh", name="one", store="file:///of/the/box", **box.asked)
    assert Registry().list() == []

    # found by whoever knows the host, recorded or not
    Registry().claim("two", spec(box.asked))
    assert [one.name for one in await provider.list()] == ["one"]
    await fleet.down("one")
    assert await provider.list() == []


# ---------------------------------------------------------------- what runs on the box


async def test_what_a_killed_server_left_is_found_and_ended(box: Box, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = -c ] || sleep 300 &\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    record, _ = Registry().claim("one", spec({**box.asked, "python": str(python)}))
    provider = get_provider("ssh")
    await provider.launch(record.spec, "one")
    [server] = [one for one in box.processes() if "art_server" in one.cmdline()]
    server.kill()
    [found] = await provider.list()
    assert (found.name, found.state) == ("one", "ending")
    await provider.terminate("one")
    assert await provider.list() == []


async def test_one_that_ignores_the_signal_is_killed(box: Box) -> None:
    record, _ = Registry().claim("one", spec(box.asked))
    provider = get_provider("ssh")
    await provider.launch(record.spec, "one")
    [server] = [one for one in box.processes() if "art_server" in one.cmdline()]
    server.suspend()
    async with login(box.route) as there:
        assert await there.run("servers.py", "stop", "one", "--grace", "0.2") == {"ended": True}
    assert await provider.list() == []


@pytest.mark.slow
async def test_one_that_is_suspended_for_good_ends_by_its_deadline(box: Box) -> None:
    record, _ = Registry().claim("one", spec(box.asked, deadline=60.0))
    provider = get_provider("ssh")
    await provider.launch(record.spec, "one")
    await provider.endpoint("one")
    [server] = [one for one in box.processes() if "art_server" in one.cmdline()]
    server.suspend()
    await until(lambda: box.processes() == [])
    assert [one async for one in provider.logs("one", follow=False) if "is up: the process" in one]
    assert await provider.list() == []


async def test_a_call_that_is_given_up_is_not_waited_for(box: Box) -> None:
    """Ctrl-C while something is installed ends at once."""

    async def install() -> None:
        async with login(box.route) as there:
            await there.run("prepare.py", "install", "key", "nothing", silence=600)

    locked = box.home / ".art-cloud" / "envs" / "key.lock"
    locked.parent.mkdir(parents=True)
    with locked.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the box is busy with it
        installing = asyncio.create_task(install())
        await until(lambda: any("install" in one.cmdline() for one in box.processes()))
        installing.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await installing
            await asyncio.get_running_loop().shutdown_default_executor()
        for process in box.processes():
            process.kill()
            process.wait(10)


# ---------------------------------------------------------------- whose it is, and its end


async def test_the_same_name_from_two_laptops_over_one_login(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that one of them does touches what the other has, if nobody says so."""
    provider = get_provider("ssh")
    first, _ = Registry().claim("one", spec(box.asked))
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "another laptop"))
    second, _ = Registry().claim("one", spec(box.asked))
    Registry().claim("two", spec(box.asked))  # so that the host stays known
    await provider.launch(first.spec, "one")
    with pytest.raises(ConflictError, match=r"one runs on gpu-box .* by .*@.*name="):
        await provider.launch(second.spec, "one")

    [running] = await provider.list()
    assert running.owner == first.spec.owner
    shown = [(one.recorded, one.state) for one in await fleet.status("one")]
    assert shown == [(True, "stopped"), (False, "starting")]
    await provider.terminate("one", only=second.has)
    assert await provider.list()
    assert "Ended one." in await art_cloud("down", "one")  # its own, of which there is nothing
    [left] = await provider.list()
    assert left.identity == running.identity
    await provider.terminate("one", only=lambda one: one.identity == "of another boot")
    found, _ = await sweep.look()
    assert [(one.name, one.kept is None) for one in found] == [("one", False), ("two", True)]

    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    await fleet.down("one")
    assert await provider.list() == []


async def test_a_stale_file_of_another_boot_makes_nobody_elses_processes_ours(box: Box) -> None:
    async with login(box.route) as there:
        stranger = await asyncio.create_subprocess_exec(
            *("bash", "-c", "sleep 3000 > /dev/null & echo $!"),
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert stranger.stdout is not None
        child = psutil.Process(int(await stranger.stdout.readline()))
        await stranger.wait()
        folder = box.home / ".art-cloud" / "clusters" / "gone"
        folder.mkdir(parents=True)
        assert BOOT is not None
        boot = BOOT.partition("/")[0]
        wrote = {"owner": "o", "mark": "m", "session": stranger.pid, "boot": boot}
        (folder / "session.json").write_text(json.dumps(wrote))
        try:
            assert await there.run("servers.py", "list") == {"servers": [], "logs": []}
            assert await there.run("servers.py", "stop", "gone") == {"ended": False}
            assert child.is_running()
        finally:
            child.kill()


async def test_one_that_cannot_be_asked_is_no_ghost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with empty_at_the_end(Box(tmp_path / "box")) as box:
        provider = get_provider("ssh")
        record, _ = Registry().claim("one", spec(box.asked))
        await provider.launch(record.spec, "one")
        await provider.endpoint("one")
        box.stop()
        settings = box.folder / "sshd_config"
        settings.write_text(f"AllowTcpForwarding no\n{settings.read_text()}")
        box.start()
        monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "another laptop"))
        Registry().claim("two", spec(box.asked))
        found, _ = await sweep.look()
        kept = {one.name: one.kept for one in found}
        assert "it can't be asked: gpu-box does not let this user forward ports" in (
            kept["one"] or ""
        )
        monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
        await provider.terminate("one")


@pytest.mark.parametrize("how", ["killed", "ended"])
async def test_a_box_is_switched_off_when_its_last_server_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(ssh, "POWEROFF_SECONDS", 3.0)
    folder, done = tmp_path / "box", tmp_path / "off"
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    with empty_at_the_end(Box(folder, f"PATH={path}")) as box:
        box.tool("poweroff", f'echo "$0" >> {done}')
        box.tool("sudo", 'shift; if [ "$1" != -l ]; then exec "$@"; fi')
        asked = {**box.asked, "on_end": "poweroff", "price_per_hour": 1.0}
        records = {}
        for name in ("one", "two"):
            records[name], _ = Registry().claim(name, spec(asked))
            await get_provider("ssh").launch(records[name].spec, name)
        receipt = await fleet.end(records["one"], ask=False)
        assert "not switched off" not in receipt.summary
        [server] = [one for one in box.processes() if "art_server" in one.cmdline()]
        await asyncio.sleep(6)
        assert not done.exists()  # another server is in use there
        if how == "killed":
            os.killpg(server.pid, signal.SIGKILL)
        else:
            await get_provider("ssh").terminate("two")
        await until(done.exists)
        await until(lambda: box.processes() == [])


async def test_a_box_that_this_user_may_not_switch_off_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    with empty_at_the_end(Box(folder, f"PATH={folder / 'bin'}")) as box:
        folder.joinpath("bin").mkdir()
        folder.joinpath("bin", "python3").symlink_to(sys.executable)
        async with login(box.route) as there:
            has = await there.run("prepare.py", "check")
        assert has["poweroff_problem"] in (None, "there is no poweroff", "there is no sudo")
        with pytest.raises(ProviderError, match=r"can't be switched off .*on_end"):
            ssh._refuse_unfit(
                "gpu-box", {**has, "poweroff_problem": "no"}, Options(on_end="poweroff")
            )
    with pytest.raises(ConfigError, match="on_end"):
        await get_provider("ssh").offers(spec({"host": "gpu-box", "on_end": "explode"}))


@pytest.mark.parametrize("may", [True, False])
def test_who_is_not_root_asks_sudo_and_is_never_asked_for_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may: bool
) -> None:
    """A script stands in for `sudo`, which would switch this machine off, and notes how it was
    asked."""
    asked = tmp_path / "asked"
    answer = "echo fine" if may else "echo a password is required; exit 1"
    note = f'printf "%s\\n" "$*" >> {asked}; {answer}'
    for tool, does in (("sudo", note), ("poweroff", "exit 1")):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.syspath_prepend(str(LAUNCH))
    prepare, servers = importlib.import_module("prepare"), importlib.import_module("servers")
    problem = None if may else "sudo -n -l poweroff: a password is required"
    assert prepare._poweroff_problem() == problem
    said = (0, "fine") if may else (1, "a password is required")
    assert servers.power(*servers.POWER_OFF) == said
    assert asked.read_text().splitlines() == ["-n -l poweroff", "-n poweroff"]


# ---------------------------------------------------------------- what the pages say


async def test_the_scripts_work_by_hand_as_their_page_says(box: Box, tmp_path: Path) -> None:
    [block] = re.findall(r"^```sh\n(.*?)^```", (LAUNCH / "README.md").read_text(), re.S | re.M)
    install = re.compile(r"^.* install mine .*\n", re.MULTILINE)  # another test does that
    assert install.search(block)
    script = install.sub("", block).replace(".art-cloud/envs/mine/bin/python", sys.executable)
    by_config = 'ssh() { command ssh -F "$C" "$@"; }; scp() { command scp -q -F "$C" "$@"; };\n'
    listed = "ssh gpu-box python3 servers.py list\n"
    shell = await asyncio.create_subprocess_exec(
        "bash",
        "-euo",
        "pipefail",
        "-c",
        by_config + script.replace("file:///tmp/art", (tmp_path / "store").as_uri()) + listed,
        cwd=ROOT,
        env=os.environ | {"C": str(box.config)},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await shell.communicate()
    assert shell.returncode == 0
    answers = [line for line in output.decode().splitlines() if line.startswith("{")]
    has, started, where, first, stopped, last = map(json.loads, answers)
    assert (started["state"], stopped) == ("started", {"ended": True})
    assert where["state"] in ("starting", "running")  # after ten seconds
    assert [server["name"] for server in first["servers"]] == ["mine"]
    assert (has["gpus"], last) == ([], {"servers": [], "logs": ["mine"]})


@pytest.mark.slow
async def test_the_example_trains_on_a_box(box: Box, tmp_path: Path, tiny_model: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "ssh" / "train.py"), "--smoke"]
    command += ["--host", box.host, "--store", (tmp_path / "store").as_uri()]
    command += ["--base-model", str(tiny_model)]
    command += ["-o", f"ssh_config={box.config}", "-o", f"python={sys.executable}"]
    example = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await example.communicate()
    assert example.returncode == 0
    assert re.fullmatch(r"step 1: reward \d\.\d\d\n", output.decode())


def test_every_option_has_a_row() -> None:
    page = (ROOT / "docs" / "providers.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", page.partition("## ssh")[2], re.MULTILINE))
    assert Options.model_fields.keys() <= rows
