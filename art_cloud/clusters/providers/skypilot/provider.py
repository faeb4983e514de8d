"""SkyPilot: the server as the job of a cluster of its own, on whatever cloud has the GPU.

What is asked of SkyPilot is in `launch/skypilot/bridge.py`, which runs in a Python that has
it: its dependencies and ours need not agree. A cluster is called "art-cloud-" and its name there.

Source of what SkyPilot does: https://docs.skypilot.co/en/latest/reference/api.html.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import JsonValue, PositiveInt

from ....links.endpoint import Endpoint, SSHRoute
from ....links.logins import NEVER_ASK, forget_login, log_in_early, read_settings, refusal
from ....shared.config import Frozen
from ....shared.errors import ConfigError, LaunchError, NotFoundError, ProviderError
from ....shared.progress import enabled, say
from ...install import LAUNCH, extras, lock, source
from ...registry import home
from ...spec import Check, ClusterSpec, Instance, Offer, Which
from .. import kit
from .bridge import call, lines

ENDPOINT = "endpoint.json"
"""Of the cluster's folder: where its server was found last."""
CONFIG = "ssh_config"
"""Of the same: how to log in to its machine."""
LOG = "server.log"
"""Of the same: what the server wrote, once it has been ended."""
KNOWN_HOSTS = "known_hosts"
"""Of the same: the key of its machine."""
OWNER = "ART_CLOUD_OWNER"
"""A variable of the task, which no other has."""
LOGIN_SECONDS = 30
"""How long logins to a machine may fail before it is given up."""
SECONDS_TO_END = 40
"""What the login and the server's own end may take; after that its machine just goes."""


T = TypeVar("T")


class Options(Frozen):
    """What `up("skypilot", ...)` takes beside the common arguments."""

    gpu: str | None = None
    """A name of SkyPilot's, "H100", with ":2" for two of them on each node."""
    cloud: str | None = None
    """"aws", "kubernetes", "slurm", ...; None: the cheapest of those that are enabled."""
    region: str | None = None
    """A Slurm cluster or a Kubernetes context is one too."""
    zone: str | None = None
    spot: bool = False
    """On-demand is taken where no spot machine can be had."""
    any_of: tuple[dict[str, JsonValue], ...] = ()
    """Resources in SkyPilot's words, each beside the other options; the cheapest is taken."""
    num_nodes: PositiveInt | None = None
    image: str | None = None
    """"docker:NAME@DIGEST" of an image whose `python` has art-cloud[server]."""
    python: str | None = None
    """A Python on the machine that has it: then nothing is installed."""
    yaml: str | None = None
    """A SkyPilot task of one's own, without a name, `run` and secrets."""

    @property
    def resources(self) -> dict[str, Any]:
        """Those of the task, as SkyPilot's YAML has them."""
        places = (self.cloud, self.region, self.zone)
        infra = "/".join(place or "*" for place in places).rstrip("/*")
        words = {"accelerators": self.gpu, "infra": infra, "image_id": self.image}
        common = {key: value for key, value in words.items() if value}
        choices: list[dict[str, Any]] = [dict(choice) for choice in self.any_of]
        if self.spot:
            both_ways = [{"use_spot": True}, {"use_spot": False}]
            choices = [
                way | choice
                for choice in choices or [{}]
                for way in ([{}] if "use_spot" in choice else both_ways)
            ]
        return common | {"any_of": choices} if choices else common


class SkyPilotProvider:
    def __init__(self) -> None:
        self._reached: dict[str, AsyncGenerator[str, None]] = {}
        """What is heard of the servers that were launched here, after they had their secrets."""

    async def offers(self, spec: ClusterSpec) -> list[Offer]:
        """What SkyPilot's catalog has of it on the clouds that are enabled.

        Raises:
            ConfigError: no cloud is enabled, no such GPU, or the YAML can't be used.
        """
        found = await call("offers", task=_task(spec, _options(spec)))
        return [Offer(provider="skypilot", **offer) for offer in found]

    async def launch(self, spec: ClusterSpec, name: str) -> None:
        """Have SkyPilot find a machine, set it up, and start the server as its job.

        Raises:
            NoMachineError: none could be had; the message says what was tried.
            ConflictError: there is one of that name that somebody else started.
        """
        options = _options(spec)
        task = _task(spec, options) | await asyncio.to_thread(_server, spec, options, name)
        async with kit.one_launch_at_a_time(name) as folder:
            _forget(folder, ENDPOINT)
            on_log, fresh = (say if enabled() else None), True
            try:
                ssh = await call("launch", name=name, task=task, on_log=on_log)
                if fresh := ssh.pop("fresh"):
                    _forget(folder, KNOWN_HOSTS, LOG)
                route = _route(folder, **ssh)
                reached = _reach(name, route, f"{OWNER}={spec.owner}", spec.server_environment())
                if await anext(reached):
                    await reached.aclose()
                else:
                    self._reached[name] = reached
                log_in_early(route)
            except ProviderError:
                if fresh:
                    await self.terminate(name)
                raise

    async def endpoint(self, name: str) -> Endpoint:
        folder = _folder(name)
        try:
            return Endpoint.model_validate_json((folder / ENDPOINT).read_text())
        except FileNotFoundError:
            pass
        route = _known_route(folder, name)
        reached = self._reached.pop(name, None) or _reach(name, route, f"ART_CLOUD_NAME={name}")
        async with aclosing(reached):
            url = await anext(url async for url in reached if url)
        endpoint = Endpoint(url=url, ssh=route)
        (folder / ENDPOINT).write_text(endpoint.model_dump_json())
        return endpoint

    async def list(self) -> list[Instance]:
        """Clusters of this user whose name at SkyPilot begins with "art-cloud-".

        Their clouds are asked, each time: what SkyPilot remembers may be gone.
        """
        return [_instance(one) for one in await call("list")]

    async def terminate(self, name: str, *, only: Which | None = None) -> None:
        """Cancel its launch, if that goes on, and have SkyPilot take the machine down, with the
        server, which ends in good order first where that can be had."""
        identity: str | None = None
        if only is not None:
            there = [_instance(one) for one in await call("list", name=name)]
            if there and not only(there[0]):
                return
            identity = there[0].identity if there else None
        await _end_server(home() / "clusters" / name, name)
        log: list[str] = []
        async for line in lines("terminate", name=name, only=identity):
            log.append(line)
            with suppress(OSError):  # a full disk keeps no machine
                (_folder(name) / LOG).write_text("\n".join(log))
        with suppress(OSError):
            _forget(_folder(name), ENDPOINT, KNOWN_HOSTS)

    async def logs(self, name: str, *, follow: bool) -> AsyncIterator[str]:
        """What the server wrote. Its machine has it, and `terminate` leaves it here."""
        kept, said, lost = _folder(name) / LOG, 0, None
        try:
            async for line in lines("logs", name=name, follow=follow):
                yield line
                said += 1
        except NotFoundError as error:
            lost = error
        if kept.exists():
            for line in kept.read_text().split("\n")[said:]:
                yield line
        elif lost:
            raise lost

    async def check(self) -> Sequence[Check]:
        """For `art-cloud doctor`: the clouds that are enabled."""
        clouds = await call("check")
        return [Check(subject="clouds of SkyPilot", state="ok", message=", ".join(clouds))]


def _options(spec: ClusterSpec) -> Options:
    options = kit.options_of(spec, Options, "A cluster on SkyPilot")
    in_all = options.any_of and all("accelerators" in choice for choice in options.any_of)
    if not (options.gpu or options.yaml or in_all):
        raise ConfigError('A cluster on SkyPilot needs a gpu="H100", accelerators or a yaml=.')
    return options


def _task(spec: ClusterSpec, options: Options) -> dict[str, Any]:
    """What is asked of SkyPilot, for `make_task` of the bridge."""
    cap = spec.max_hourly
    if spec.budget is not None and spec.offer is not None:
        cap = spec.offer.price_per_hour  # the server counts with it
    return {
        "resources": options.resources,
        "num_nodes": options.num_nodes,
        "yaml": str(Path(options.yaml).expanduser().resolve()) if options.yaml else None,
        "max_hourly_cost": cap,
        "envs": {},
        "mounts": {},
    }


def _server(spec: ClusterSpec, options: Options, name: str) -> dict[str, Any]:
    """The part of the task that says which server is installed and run."""
    envs = {
        "ART_CLOUD_NAME": name,
        OWNER: spec.owner,
        "ART_CLOUD_ARGUMENTS": shlex.join(spec.server_arguments(name)),
        "ART_CLOUD_SECONDS": f"{spec.cap_seconds:.0f}" if math.isfinite(spec.cap_seconds) else "0",
        "ART_CLOUD_PYTHON": options.python or ("python" if options.image else ""),
    }
    if envs["ART_CLOUD_PYTHON"]:
        return {"envs": envs}
    what, wanted = source(), extras(spec.engine)
    envs["ART_CLOUD_ENVIRONMENT"] = what.environment(spec.engine)
    envs["ART_CLOUD_REQUIREMENT"] = what.requirement(wanted)
    mounts = {
        "~/.art-cloud/prepare.py": str(LAUNCH / "ssh" / "prepare.py"),
        "~/.art-cloud/server.lock.txt": str(lock(spec.engine)),
    }
    if what.wheel is not None:
        envs["ART_CLOUD_REQUIREMENT"] = f"art-cloud[{wanted}]"  # server.yaml finds the wheel
        mounts[f"~/.art-cloud/wheels/{what.wheel.name}"] = str(what.wheel)
    return {"envs": envs, "mounts": mounts}


async def _reach(
    name: str, route: SSHRoute, variable: str, secrets: dict[str, str] | None = None
) -> AsyncGenerator[str, None]:
    """The address of the server, once it listens; before that "", once it has the `secrets`.

    SkyPilot must not know them: it writes secrets of a task to disks, and gives them to programs as
    arguments. The login is made while the server is on its way, and again if that takes longer.

    Raises:
        LaunchError: the server has ended, or the machine is gone.
    """
    command = ["sh", "-c", (LAUNCH / "skypilot" / "reach.sh").read_text(), "sh", variable]
    exports = (f"export {key}={shlex.quote(value)}\n" for key, value in (secrets or {}).items())
    said, give_up = "".join(exports).encode(), time.monotonic() + LOGIN_SECONDS
    ended = asyncio.ensure_future(call("follow", name=name))
    try:
        while True:
            async with _login(route, shlex.join([*command, *(["take"] if said else [])])) as there:
                assert there.stdin is not None
                assert there.stdout is not None
                assert there.stderr is not None
                there.stdin.write(said)
                there.stdin.write_eof()
                while line := await _unless_ended(name, ended, there.stdout.readline()):
                    give_up = time.monotonic() + LOGIN_SECONDS
                    if line == b"taken\n":
                        said = b""
                        yield ""
                    elif line != b"in\n":
                        yield json.loads(line)["url"]
                        return
                why = await _unless_ended(name, ended, there.stderr.read())
            if time.monotonic() > give_up:
                settings = await asyncio.to_thread(read_settings, route)
                raise ProviderError(str(refusal(route, settings, why.decode(errors="replace"))))
            await _unless_ended(name, ended, asyncio.sleep(1))
    finally:
        ended.cancel()


async def _unless_ended(
    name: str, ended: asyncio.Future[list[str]], coming: Coroutine[None, None, T]
) -> T:
    """What is `coming`, unless the server ends before."""
    awaited = asyncio.ensure_future(coming)
    try:
        futures: list[asyncio.Future[Any]] = [awaited, ended]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if awaited.done():
            return await awaited
        log = await ended
    except NotFoundError as error:
        raise LaunchError(f"The machine of {name} is gone, or has ended. {error}") from error
    finally:
        awaited.cancel()
    what = f"The server of {name} ended, or was never started"
    raise kit.ended(what, log, "what it and its set-up wrote")


def _route(folder: Path, host: str, config: str) -> SSHRoute:
    """The way to the machine that SkyPilot started, by its ssh configuration.

    SkyPilot takes any host key, each time. Here the first one that is seen, when the machine is
    new, is the one that it must have from then on.
    """
    own = (
        f"Host {host}\n"
        f"  HostKeyAlias {host}\n"
        f"  UserKnownHostsFile {folder / KNOWN_HOSTS}\n"
        "  StrictHostKeyChecking accept-new\n\n"
    )
    (folder / CONFIG).write_text(own + config)
    return _known_route(folder, folder.name)


def _known_route(folder: Path, name: str) -> SSHRoute:
    return SSHRoute(host=f"art-cloud-{name}", config=str(folder / CONFIG))


@asynccontextmanager
async def _login(route: SSHRoute, command: str) -> AsyncIterator[Process]:
    """A command that runs there, and ends with the block."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *("ssh", *route.options, *NEVER_ASK, route.host, command),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _instance(found: dict[str, Any]) -> Instance:
    started_at = datetime.fromtimestamp(found["started_at"], UTC)
    return Instance.model_validate({**found, "provider": "skypilot", "started_at": started_at})


def _folder(name: str) -> Path:
    folder = home() / "clusters" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


async def _end_server(folder: Path, name: str) -> None:
    """In good order, if its machine can be reached."""
    if not (folder / KNOWN_HOSTS).exists():
        return
    route = _known_route(folder, name)
    await forget_login(route)
    server = f"'[-]m art_server --name {name} '"  # not the pattern itself
    stop = f"pkill -f {server}; while pgrep -f {server}; do sleep 0.2; done"
    with suppress(TimeoutError):
        async with asyncio.timeout(SECONDS_TO_END):
            async with _login(route, stop) as login:
                await login.communicate()


def _forget(folder: Path, *names: str) -> None:
    """What was known of the machine before."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
