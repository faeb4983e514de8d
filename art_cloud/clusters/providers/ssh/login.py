"""A login on another machine by fabric, as the user's own ssh would make it; scripts run there.

`ssh -G` says what the user's configuration means for a host, so that whatever `ssh HOST` respects
is respected here. Host keys are strict: one that is not known, or another one, ends the login.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from ....links.endpoint import SSHRoute
from ....shared.errors import ConfigError, NotFoundError, ProviderError
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
    if shutil.which("ssh") is None:
        raise ConfigError("There is no ssh here. Install OpenSSH's client.")


@asynccontextmanager
async def login(route: SSHRoute) -> AsyncIterator[Login]:
    """Log in to the machine.

    Raises:
        ConfigError: fabric is not installed, or ssh does not understand its configuration.
        ProviderError: it does not answer, refuses the key, or has another key than is known.
    """
    require_ssh()
    connection = await asyncio.to_thread(_connection, route)
    try:
        with _failures(route):
            await asyncio.to_thread(connection.open)
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


def _settings(route: SSHRoute) -> dict[str, list[str]]:
    """What the user's ssh would do for this host: every setting with its values."""
    ssh = shutil.which("ssh") or "ssh"
    found = subprocess.run(
        [ssh, *route.options, "-G", "--", route.host], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise ConfigError(f"ssh does not take {route.host!r}: {found.stderr.strip()}")
    settings: dict[str, list[str]] = {}
    for line in found.stdout.splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key, []).append(value)
    return settings


def _connection(route: SSHRoute) -> fabric.Connection:
    import fabric
    import paramiko

    settings = _settings(route)
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
            "key_filename": [str(key) for key in keys if key.exists()],
            "look_for_keys": False,
            "banner_timeout": CONNECT_SECONDS,
            "auth_timeout": CONNECT_SECONDS,
        },
    )
    known = [Path(path).expanduser() for path in _known_hosts(settings)]
    for path in known:
        if path.is_file():
            connection.client.load_host_keys(str(path))  # nothing is ever written to it
    alias = settings.get("hostkeyalias", [""])[0]
    connection.client.set_missing_host_key_policy(_refusal(route, alias, known))
    return connection


def _known_hosts(settings: dict[str, list[str]]) -> Iterator[str]:
    for key in ("userknownhostsfile", "globalknownhostsfile"):
        for value in settings.get(key, []):
            yield from shlex.split(value)


def _gateway(route: SSHRoute, settings: dict[str, list[str]]) -> str | None:
    """The command whose input and output are the connection, where there is no direct one."""
    hostname, user, port = (settings[key][0] for key in ("hostname", "user", "port"))
    if jump := settings.get("proxyjump"):
        *before, last = jump[0].split(",")
        command = ["ssh", *route.options, "-o", "BatchMode=yes"]
        command += ["-J", ",".join(before)] if before else []
        return shlex.join([*command, "-W", f"[{hostname}]:{port}", last])
    if command := settings.get("proxycommand", []):
        tokens = {"%h": hostname, "%n": route.host, "%p": port, "%r": user, "%%": "%"}
        shell = re.sub("%[hnpr%]", lambda found: tokens[found[0]], command[0])
        return shlex.join(["sh", "-c", shell])  # ssh hands it to a shell, paramiko does not
    return None


def _refusal(route: SSHRoute, alias: str, known: list[Path]) -> paramiko.MissingHostKeyPolicy:
    """Takes no key that is not known, under the host's own name or its HostKeyAlias."""
    import paramiko

    class Refusal(paramiko.MissingHostKeyPolicy):
        def missing_host_key(
            self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
        ) -> None:
            if alias and client.get_host_keys().check(alias, key):
                return
            raise ProviderError(
                f"The key of {route.host} is not known: nothing is said of {alias or hostname} in "
                f"{', '.join(map(str, known))}. Log in once by hand and compare what it shows: "
                f"{_by_hand(route)}"
            )

    return Refusal()


def _by_hand(route: SSHRoute) -> str:
    return shlex.join(route.command)


@contextmanager
def _failures(route: SSHRoute) -> Iterator[None]:
    """What can go wrong with a connection, said in words."""
    import paramiko

    try:
        yield
    except paramiko.BadHostKeyException as error:
        raise ProviderError(
            f"{route.host} has another key than the one that is known for {error.hostname}: either "
            "it was set up anew, or somebody else answers in its place. If you know that it was, "
            f"forget the old key (ssh-keygen -R) and log in once by hand: {_by_hand(route)}"
        ) from None
    except paramiko.AuthenticationException as error:
        raise ProviderError(
            f"{route.host} takes none of your keys ({error}). This must work without a question: "
            f"{_by_hand(route)} true. A key with a passphrase: ssh-add it first."
        ) from None
    except (paramiko.SSHException, OSError, EOFError) as error:
        why = str(error) or type(error).__name__
        raise ProviderError(
            f"{route.host} does not answer: {why}. Is it on? Try: {_by_hand(route)} true"
        ) from None
