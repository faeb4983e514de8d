"""A login on another machine by fabric, as the user's own ssh would make it; scripts run there.

`ssh -G` says what the user's configuration means for a host. What fabric cannot do of that is
listed in docs/tunnel.md, and said where it stops a login. Host keys are strict: one that is not
known, or another one, ends the login.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
import subprocess
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from ....links.endpoint import SSHRoute
from ....links.logins import Settings, check_login, known_hosts, read_settings, require_system_ssh
from ....shared.errors import ConfigError, NotFoundError, ProviderError, ServerUnavailableError
from ...install import LAUNCH

if TYPE_CHECKING:
    import fabric
    import paramiko

CONNECT_SECONDS = 15.0
SILENCE_SECONDS = 60.0
"""How long the other side may take for its next word."""
NOTHING_OF_THAT_NAME = 3
"""Exit code of servers.py."""

Script = Literal["prepare.py", "servers.py"]


def require_ssh() -> None:
    """Raises `ConfigError` if what ssh needs is not installed here."""
    if find_spec("fabric") is None:
        raise ConfigError("ssh needs fabric. Run: pip install 'art-cloud[ssh]'")
    require_system_ssh()


async def require_login(route: SSHRoute) -> None:
    """See that the login works, for a tunnel too.

    Raises:
        ProviderError: it does not; the message says why.
    """
    try:
        await check_login(route)
    except ServerUnavailableError as error:
        raise ProviderError(str(error)) from error


@asynccontextmanager
async def login(route: SSHRoute) -> AsyncIterator[Login]:
    """Log in to the machine.

    Raises:
        ConfigError: fabric is not installed, or ssh does not understand its configuration.
        ProviderError: it does not let fabric in; the message says why.
    """
    require_ssh()
    settings = await asyncio.to_thread(read_settings, route)
    connection = await asyncio.to_thread(_connection, route, settings)
    try:
        await _open(route, connection)
        yield Login(route, connection)
    finally:
        connection.client.close()  # also wakes the thread of a call that was cancelled


class Login:
    def __init__(self, route: SSHRoute, connection: fabric.Connection) -> None:
        self.route = route
        self._connection = connection

    async def run(
        self, script: Script, *arguments: str, stdin: str = "", silence: float = SILENCE_SECONDS
    ) -> Any:
        """Run a script of launch/ssh there and return its answer.

        Raises:
            NotFoundError: there is nothing of the name that was asked for.
            ProviderError: it failed, or the connection broke; the message names the host.
        """
        channel = await self._start(script, arguments, stdin, silence)
        with _failures(self.route):
            output, errors = await asyncio.to_thread(_read, channel)
        self._check(channel, errors)
        return json.loads(output) if output else None

    async def lines(self, script: Script, *arguments: str) -> AsyncIterator[str]:
        """Run a script there and give what it prints as it comes."""
        channel = await self._start(script, arguments, "", None)
        with _failures(self.route), channel.makefile("r") as output:
            while line := await asyncio.to_thread(output.readline):
                yield line.rstrip("\n")
        self._check(channel, channel.makefile_stderr().read())

    async def put(self, path: Path, key: str) -> str:
        """Copy a file there, to what is installed as `key`, and return its path."""
        target = f"{(await self.run('prepare.py', 'wheels', key))['path']}/{path.name}"

        def copy() -> None:
            partial = f"{target}.{uuid4().hex}"
            self._connection.put(str(path), partial)
            self._connection.sftp().posix_rename(partial, target)

        with _failures(self.route):
            await asyncio.to_thread(copy)
        return target

    async def _start(
        self, script: Script, arguments: tuple[str, ...], stdin: str, silence: float | None
    ) -> paramiko.Channel:
        def run() -> paramiko.Channel:
            channel: paramiko.Channel = self._connection.create_session()
            channel.settimeout(silence)
            channel.exec_command(shlex.join(["python3", "-c", _text(script), *arguments]))
            channel.sendall(stdin.encode())
            channel.shutdown_write()
            return channel

        with _failures(self.route):
            return await asyncio.to_thread(run)

    def _check(self, channel: paramiko.Channel, errors: bytes) -> None:
        code = channel.recv_exit_status()
        message = errors.decode(errors="replace").strip()
        if code == NOTHING_OF_THAT_NAME:
            raise NotFoundError(f"{self.route.host}: {message}")
        if code == 127:
            raise ProviderError(
                f"{self.route.host} has no python3 for a login without a terminal. Install it, "
                f"3.8 or newer, so that this works: {_by_hand(self.route)} python3 -V"
            )
        if code:
            raise ProviderError(f"{self.route.host}: {message or f'it ended with code {code}'}")


@cache
def _text(script: Script) -> str:
    return (LAUNCH / "ssh" / script).read_text()


def _read(channel: paramiko.Channel) -> tuple[bytes, bytes]:
    return channel.makefile("rb").read(), channel.makefile_stderr("rb").read()


def _connection(route: SSHRoute, settings: Settings) -> fabric.Connection:
    import fabric
    import paramiko

    hostname, user, port = (settings[key][0] for key in ("hostname", "user", "port"))
    keys = [Path(path).expanduser() for path in settings.get("identityfile", [])]
    connection = fabric.Connection(
        hostname,
        user=user,
        port=int(port),
        gateway=_gateway(route, settings) or False,
        connect_timeout=int(CONNECT_SECONDS),
        config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        connect_kwargs={
            "pkey": _certified(settings),
            "key_filename": [str(key) for key in keys if key.exists()],
            "look_for_keys": False,
            "banner_timeout": CONNECT_SECONDS,
            "auth_timeout": CONNECT_SECONDS,
        },
    )
    if agent := settings.get("identityagent"):
        connection.client._agent = _agent_at(agent[0])
    connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
    here = hostname if port == "22" else f"[{hostname}]:{port}"
    for kind, blob in _known_keys(settings, settings.get("hostkeyalias", [here])[0]):
        with suppress(paramiko.SSHException, paramiko.pkey.UnknownKeyType):
            key = paramiko.PKey.from_type_string(kind, b64decode(blob))
            connection.client.get_host_keys().add(here, kind, key)
    return connection


def _agent_at(address: str) -> paramiko.Agent:
    """The agent that `IdentityAgent` names: one without keys, if it is "none" or away."""
    import paramiko

    class Agent(paramiko.Agent):
        def __init__(self) -> None:  # paramiko's own looks at SSH_AUTH_SOCK only
            paramiko.agent.AgentSSH.__init__(self)

    if address == "SSH_AUTH_SOCK":
        return paramiko.Agent()
    agent, place = Agent(), socket.socket(socket.AF_UNIX)
    try:
        place.connect(os.path.expandvars(Path(address).expanduser()))
    except OSError:
        place.close()
    else:
        agent._connect(place)  # type: ignore[attr-defined]
    return agent


def _known_keys(settings: Settings, name: str) -> list[tuple[str, str]]:
    """Kind and key of all that is known of a host, as ssh would look it up."""
    known, revoked = [], set()
    for path in known_hosts(settings):
        command = ["ssh-keygen", "-F", name, "-f", str(path)]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for line in found.splitlines():
            marker, *fields = line.split() if line[0] in "#@" else ["", *line.split()]
            if marker == "@revoked":
                revoked.add(fields[2])
            elif not marker:
                known.append((fields[1], fields[2]))
    return [one for one in known if one[1] not in revoked]


def _certified(settings: Settings) -> paramiko.PKey | None:
    """A key with a certificate that does not lie beside it: `CertificateFile`."""
    import paramiko

    for certificate in settings.get("certificatefile", []):
        for key in settings.get("identityfile", []):
            with suppress(paramiko.SSHException, ValueError, OSError):
                found = paramiko.PKey.from_path(Path(key).expanduser())
                found.load_certificate(str(Path(certificate).expanduser()))
                return found
    return None


def _gateway(route: SSHRoute, settings: Settings) -> str | None:
    """The command whose input and output are the connection, where there is no direct one."""
    hostname, user, port = (settings[key][0] for key in ("hostname", "user", "port"))
    if jump := settings.get("proxyjump"):
        *before, last = jump[0].split(",")
        command = ["ssh", *route.options, "-o", "BatchMode=yes"]
        command += ["-J", ",".join(before)] if before else []
        return shlex.join([*command, "-W", f"[{hostname}]:{port}", _url(last)])
    if command := settings.get("proxycommand", []):
        tokens = {"%h": hostname, "%n": route.host, "%p": port, "%r": user, "%%": "%"}
        shell = re.sub("%[hnpr%]", lambda found: tokens[found[0]], command[0])
        return shlex.join(["sh", "-c", shell])  # ssh hands it to a shell, paramiko does not
    return None


def _url(jump: str) -> str:
    """A machine of `ProxyJump`, which may name a user and a port, as an argument of ssh."""
    return jump if jump.startswith("ssh://") else f"ssh://{jump}"


def _by_hand(route: SSHRoute) -> str:
    return shlex.join(route.command)


async def _open(route: SSHRoute, connection: fabric.Connection) -> None:
    import paramiko

    try:
        await asyncio.to_thread(connection.open)
    except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
        await require_login(route)
        raise ProviderError(
            f"`{_by_hand(route)}` gets in, and fabric, which sets the machine up, does not "
            f"({error or type(error).__name__}). It takes keys in files and in an agent, "
            "and host keys that stand in known_hosts: ssh-add what is on a security key or smart "
            "card; in place of Kerberos have a key, of a certificate of the host or "
            "KnownHostsCommand the host's own key. See the table in docs/tunnel.md."
        ) from None


@contextmanager
def _failures(route: SSHRoute) -> Iterator[None]:
    """A connection that breaks, said in words."""
    import paramiko

    try:
        yield
    except (paramiko.SSHException, OSError, EOFError) as error:
        why = str(error) or type(error).__name__
        raise ProviderError(
            f"The connection to {route.host} broke: {why}. Try: {_by_hand(route)} true"
        ) from None
