"""Machines that you can log in to: the server as a process there that outlives the login.

What happens on the machine is in `launch/ssh`; this module decides which machine, and says
what went wrong in words. It keeps no record: hosts are those of the recorded clusters, and those of
the file `<home>/ssh-hosts`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ....links.endpoint import Endpoint, SSHRoute
from ....shared.config import Frozen
from ....shared.errors import (
    ArtCloudError,
    ConflictError,
    IncompleteListError,
    LaunchError,
    NoMachineError,
    NotFoundError,
    ProviderError,
)
from ....shared.progress import say
from ....shared.version import __version__
from ...install import extras, lock, source
from ...registry import Registry, whoami
from ...spec import Check, ClusterSpec, Instance, Offer, Which
from ..kit import ended, instance_of, one_launch_at_a_time
from .hosts import Options, options_of, routes_of
from .login import Login, login, require_login, require_ssh

INSTALL_SECONDS = 1500.0
STOP_SECONDS = 90.0
"""Above what servers.py gives a server to end."""
INSTALLED_BYTES = 10e9
"""What an environment takes, with torch for a GPU."""
POWEROFF_SECONDS = 60.0
"""After the last server has ended: a server that takes its place is not switched off."""
SKEW_SECONDS = 60.0
"""Above it, S3 servers begin to refuse signatures (at 5 to 15 minutes)."""


class SSHProvider:
    async def offers(self, spec: ClusterSpec) -> list[Offer]:
        """One for each host. Nobody is asked."""
        require_ssh()
        options = options_of(spec)
        price = options.price_per_hour
        return [
            Offer(provider="ssh", region=route.host, price_per_hour=price)
            for route in routes_of(options)
        ]

    async def launch(self, spec: ClusterSpec, name: str) -> None:
        """Take the first host that can, set it up, and start the server.

        Raises:
            ConflictError: a server of that name runs there that was started from elsewhere.
            NoMachineError: no host can; the message says of each why.
            LaunchError: the connection broke while it was started: it may run.
        """
        options = options_of(spec)
        routes = routes_of(options)
        async with one_launch_at_a_time(name):
            if len(routes) > 1:
                found, _ = await _ask_all(routes)
                routes = [one.route for one in found if one.has(name)] or routes
            refusals = []
            for route in routes:
                try:
                    await require_login(route)
                    async with login(route) as there:
                        await _launch(there, spec, options, name, alone=len(routes) > 1)
                    return
                except LaunchError:
                    raise
                except ProviderError as error:
                    refusals.append(str(error))
        raise NoMachineError("\n".join(refusals))

    async def endpoint(self, name: str) -> Endpoint:
        async with login(await _route_of(name)) as there:
            while True:
                answer = await there.run("servers.py", "endpoint", name)
                if answer["state"] == "running":
                    return Endpoint(url=answer["url"], ssh=there.route)
                if answer["state"] == "ended":
                    where = f"The server of {name} on {there.route.host}"
                    raise ended(f"{where} ended", answer["log"])

    async def list(self) -> list[Instance]:
        """What runs at all hosts that are known.

        Raises:
            IncompleteListError: some of them can't tell.
        """
        found, failures = await _ask_all(_known_routes())
        instances = [_instance(one.route, server) for one in found for server in one.servers]
        if failures:
            raise IncompleteListError(" ".join(failures.values()), instances, _unsure(failures))
        return instances

    async def terminate(self, name: str, *, only: Which | None = None) -> None:
        """SIGTERM to the server, and SIGKILL to whatever of it is left after a minute.

        A host that does not answer is an error only if no other had the server.
        """
        found, failures = await _ask_all(_routes_of(name))
        having = [one.route for one in found if one.instances(name, only)]
        await asyncio.gather(*(_stop(route, name, only) for route in having))
        if failures and not having:
            raise ProviderError(
                f"{' '.join(failures.values())} What may run of {name} there ends by itself when "
                "its lease, idle limit or deadline passes."
            )

    async def logs(self, name: str, *, follow: bool) -> AsyncIterator[str]:
        async with login(await _route_of(name)) as there:
            async for line in there.lines(
                "servers.py", "log", name, *(["--follow"] if follow else [])
            ):
                yield line

    async def check(self) -> Sequence[Check]:
        """For `art-cloud doctor`: what ssh needs here, and every host that is known."""
        require_ssh()
        return await asyncio.gather(*map(_check_host, _known_routes()))


class _Answer(Frozen):
    """What one host says of the servers that it has."""

    route: SSHRoute
    servers: list[dict[str, Any]]
    logs: list[str]

    def has(self, name: str) -> bool:
        return any(server["name"] == name for server in self.servers)

    def instances(self, name: str, only: Which | None) -> list[Instance]:
        """What it has of that name, if it is meant."""
        there = [_instance(self.route, one) for one in self.servers if one["name"] == name]
        return [one for one in there if only is None or only(one)]


def _known_routes() -> list[SSHRoute]:
    records = [record.spec for record in Registry().list() if record.spec.provider == "ssh"]
    routes = [route for spec in records for route in options_of(spec).routes()]
    return list(dict.fromkeys([*routes, *Options().routes()]))


def _unsure(silent: Collection[str]) -> list[str]:
    """The recorded clusters that may be on one of these hosts."""
    records = [record for record in Registry().list() if record.spec.provider == "ssh"]
    return [
        record.name
        for record in records
        if any(route.host in silent for route in options_of(record.spec).routes())
    ]


def _routes_of(name: str) -> list[SSHRoute]:
    """Where the cluster can be: the hosts of its record, or all that are known."""
    record = Registry().get(name)
    if record is None or record.spec.provider != "ssh":
        return _known_routes()
    return options_of(record.spec).routes()


async def _route_of(name: str) -> SSHRoute:
    """The host that has the cluster; where none has, one that has its log."""
    routes = _routes_of(name)
    if len(routes) == 1:
        return routes[0]
    found, failures = await _ask_all(routes)
    for one in found:
        if one.has(name):
            return one.route
    for one in found:
        if name in one.logs:
            return one.route
    if failures:
        raise ProviderError(" ".join(failures.values()))
    raise NotFoundError(f"No host that is known here has a cluster {name!r}.")


async def _ask_all(routes: list[SSHRoute]) -> tuple[list[_Answer], dict[str, str]]:
    """The answers of these hosts, and why the others gave none."""

    async def ask(route: SSHRoute) -> _Answer | ProviderError:
        try:
            async with login(route) as there:
                return _Answer.model_validate(
                    {"route": route, **await there.run("servers.py", "list")}
                )
        except ProviderError as error:
            return error

    answers = await asyncio.gather(*map(ask, routes))
    return (
        [answer for answer in answers if isinstance(answer, _Answer)],
        {
            route.host: str(answer)
            for route, answer in zip(routes, answers, strict=True)
            if isinstance(answer, ProviderError)
        },
    )


async def _launch(
    there: Login, spec: ClusterSpec, options: Options, name: str, *, alone: bool
) -> None:
    host = there.route.host
    servers = (await there.run("servers.py", "list"))["servers"]
    state = next((server for server in servers if server["name"] == name), None)
    if state is None:
        has = await there.run("prepare.py", "check", *([options.python] if options.python else []))
        _refuse_unfit(host, has, options)
        say(f"{host}: {describe(has)}")
        python = options.python or await _install(there, spec, has)
        arguments = [*(["--if-free"] if alone else []), "--by", whoami()]
        if options.on_end == "poweroff":
            arguments += ["--poweroff", f"{POWEROFF_SECONDS:g}"]
        arguments += [name, python, *spec.server_arguments(name)]
        secrets = json.dumps(spec.server_environment())
        try:
            state = await there.run("servers.py", "start", *arguments, stdin=secrets)
        except ProviderError as error:
            raise LaunchError(str(error)) from error
    if state["state"] == "busy":
        raise ProviderError(f"{host} has a server already: {', '.join(state['with'])}.")
    if state["owner"] != spec.owner:
        raise ConflictError(
            f"A server {name} runs on {host} that was started from elsewhere, by "
            f"{state.get('by') or 'somebody'}, so its token is not known here. Give yours another "
            "name (name=)."
        )


def _refuse_unfit(host: str, has: dict[str, Any], options: Options) -> None:
    if has["memory_bytes"] < options.min_memory_gb * 1e9:
        raise ProviderError(
            f"{host} has {has['memory_bytes'] / 1e9:.1f} GB of memory left, and "
            f"{options.min_memory_gb:g} are asked for (min_memory_gb)."
        )
    names = [gpu["name"] for gpu in has["gpus"]]
    if options.gpu and not any(options.gpu.lower() in name.lower() for name in names):
        why = has["gpu_problem"] or f"it has {', '.join(names) or 'none'}"
        raise ProviderError(f"{host} shows no GPU {options.gpu}: {why}.")
    if options.on_end == "poweroff" and has["poweroff_problem"]:
        raise ProviderError(
            f"{host} can't be switched off by this user ({has['poweroff_problem']}), and "
            'on_end="poweroff" asks for it. Allow it there without a password (a line of sudoers: '
            "USER ALL=(root) NOPASSWD: /usr/sbin/poweroff), or leave on_end away."
        )
    if options.python and has["art_cloud"] != __version__:
        raise ProviderError(
            f"{options.python} on {host} has art-cloud {has['art_cloud']}, and this is "
            f"{__version__}. Run there: {options.python} -m pip install "
            f"'art-cloud[server]=={__version__}'"
        )


def describe(has: dict[str, Any]) -> str:
    """What prepare.py found on a machine, in a line."""
    gpus = [f"{gpu['name']} ({gpu['memory']}, driver {gpu['driver']})" for gpu in has["gpus"]]
    none = f"no GPU ({has['gpu_problem']})" if has["gpu_problem"] else "no GPU"
    return (
        f"{', '.join(gpus) or none + ', so it runs on the CPU'}; "
        f"{has['memory_bytes'] / 1e9:.0f} GB of memory and {has['disk_bytes'] / 1e9:.0f} GB of "
        "disk free"
    )


async def _install(there: Login, spec: ClusterSpec, has: dict[str, Any]) -> str:
    """An environment with this version on the machine, made once; returns its Python."""
    what = await asyncio.to_thread(source)
    key, wanted = what.environment(spec.engine), extras(spec.engine)
    wheel, pins = None, []
    if key not in has["environments"]:
        if has["disk_bytes"] < INSTALLED_BYTES:
            raise ProviderError(
                f"{there.route.host} has {has['disk_bytes'] / 1e9:.1f} GB of disk left, and "
                f"{INSTALLED_BYTES / 1e9:.0f} are needed to install art-cloud with torch in "
                "~/.art-cloud. Free some, or name a python= that has it."
            )
        say(f"{there.route.host}: installing art-cloud[{wanted}] {what.key}, once for all clusters")
        wheel = await there.put(what.wheel, what.key) if what.wheel else None
        pins = [await there.put(lock(spec.engine), what.key)]
    arguments = ["install", key, what.requirement(wanted, wheel), *pins]
    answer = await there.run("prepare.py", *arguments, silence=INSTALL_SECONDS)
    return str(answer["python"])


def _instance(route: SSHRoute, server: dict[str, Any]) -> Instance:
    started_at = datetime.now(UTC) - timedelta(seconds=server["age"])  # by the clock here
    return instance_of("ssh", f"{route.host}, ", server, started_at)


async def _stop(route: SSHRoute, name: str, only: Which | None) -> None:
    """What is meant is ended by its identity, until there is nothing more that is."""
    async with login(route) as there:
        if only is None:
            await there.run("servers.py", "stop", name, silence=STOP_SECONDS)
            return
        while True:
            answer = {"route": route, **await there.run("servers.py", "list")}
            meant = _Answer.model_validate(answer).instances(name, only)
            if not meant:
                return
            arguments = ["stop", name, "--only", meant[0].identity]
            await there.run("servers.py", *arguments, silence=STOP_SECONDS)


async def _check_host(route: SSHRoute) -> Check:
    subject = f"host {route.host}"
    try:
        await require_login(route)
        async with login(route) as there:
            before = time.time()
            has = await there.run("prepare.py", "check")
            skew = has["time"] - (before + time.time()) / 2
    except ArtCloudError as error:
        return Check(subject=subject, state="broken", message=str(error))
    if has["disk_bytes"] < INSTALLED_BYTES and not has["environments"]:
        cure = f"Free some: art-cloud takes {INSTALLED_BYTES / 1e9:.0f} GB there."
        return Check(subject=subject, state="broken", message=describe(has), cure=cure)
    if has["gpu_problem"]:
        cure = "nvidia-smi must work there: see to the driver."
        return Check(subject=subject, state="broken", message=describe(has), cure=cure)
    if abs(skew) > SKEW_SECONDS:
        message = f"Its clock is {skew:+.0f} s off this machine's"
        cure = "Have NTP set both: signed requests to a store fail on a wrong clock."
        return Check(subject=subject, state="warning", message=message, cure=cure)
    return Check(subject=subject, state="ok", message=f"{describe(has)}; Python {has['python']}")
