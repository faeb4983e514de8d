"""Logins that carry connections to ports of another machine's loopback.

`log_in` uses asyncssh. What asyncssh can't log in to the system's `ssh` may: a `ProxyCommand` of
its own kind, a token or a smart card, Kerberos, a shared `ControlPath`. Host keys are checked in
either case, never accepted: that is what a first `ssh HOST` is for.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ..shared.errors import ArtCloudError, ConfigError, ProviderError, ServerUnavailableError
from ..shared.progress import say_once
from .endpoint import SSHRoute

if TYPE_CHECKING:
    import asyncssh

    from .relay import End

LOGIN_SECONDS = 30.0
"""A `ProxyCommand` may take long to start: SkyPilot's is Python that imports all of SkyPilot."""
KEEPALIVE_SECONDS, KEEPALIVES = 5, 3
"""Unless the ssh configuration says otherwise: a silent connection is given up after 20 s."""
CONFIGS = ("~/.ssh/config", "/etc/ssh/ssh_config")
KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
FAST_CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
"""Processors have instructions for them, as they have not for chacha20, ssh's first choice."""
CLOSED = "SSH connection closed"
"""What asyncssh says of a channel whose login ended."""


Connected = tuple["asyncssh.SSHClientConnection", "asyncio.Future[Exception | None]"]
"""A login, and what is told why it ended."""
_early: dict[SSHRoute, asyncio.Task[Connected]] = {}


class LinkLostError(Exception):
    """The login ended; another one may be had."""


class Link(Protocol):
    """A login."""

    client: str
    """Which program holds it: "asyncssh" or "ssh"."""
    address: str | None
    """The address of this machine that it goes out from, where that is known."""

    async def open(self, end: End) -> None:
        """Connect `end` to the port.

        Raises:
            LinkLostError: the login has ended.
            ServerUnavailableError: nothing listens there.
            ProviderError: the machine does not allow it.
        """
        ...

    async def lost(self) -> str:
        """Wait until the login ended, and return why."""
        ...

    def close(self) -> None: ...


async def log_in(route: SSHRoute, port: int, *, with_ssh: bool | None = None) -> Link:
    """Log in to a machine that then connects to `port` of its own loopback.

    Args:
        with_ssh: take the system's `ssh`; None: if asyncssh can't log in.

    Raises:
        ServerUnavailableError: the machine does not answer; it may later.
        ProviderError: it lets nobody in this way, or is not the machine that is known.
        ConfigError: the ssh configuration can't be read, or there is neither asyncssh nor `ssh`.
    """
    if with_ssh:
        return await _Command.start(route, port)
    try:
        return await _log_in_with_asyncssh(route, port)
    except (ProviderError, ConfigError) as error:
        if with_ssh is False or shutil.which("ssh") is None:
            raise
        try:
            link = await _Command.start(route, port)
        except ArtCloudError:
            raise error from None
        say_once(f"{route.host}: the system's ssh is used. asyncssh can't log in: {error}")
        return link


def log_in_early(route: SSHRoute) -> None:
    """Begin the login that the next `log_in` there takes, or `forget_login` ends."""
    early = _early[route] = asyncio.create_task(_connected(route))
    early.add_done_callback(lambda early: early.cancelled() or early.exception())  # no complaint


def forget_login(route: SSHRoute) -> None:
    early = _early.pop(route, None)
    if early is not None and not early.cancel() and not (early.cancelled() or early.exception()):
        early.result()[0].abort()


async def _early_login(route: SSHRoute) -> Connected | None:
    early = _early.pop(route, None)
    if early is not None and early.get_loop() is asyncio.get_running_loop():
        with suppress(Exception):  # what is wrong shows at the next login
            connected = await early
            if not connected[1].done():
                return connected
    return None


async def _log_in_with_asyncssh(route: SSHRoute, port: int) -> Link:
    try:
        import asyncssh
    except ImportError as error:
        raise ConfigError(
            f"A tunnel to {route.host} takes asyncssh: pip install 'art-cloud[ssh]'."
        ) from error
    try:
        async with asyncio.timeout(LOGIN_SECONDS):
            return _Login(route, port, *(await _early_login(route) or await _connected(route)))
    except asyncssh.PermissionDenied as error:
        raise ProviderError(
            f"{route.host} does not let this user in: {error.reason}. See whether "
            f"`{shlex.join(route.command)}` works. A key with a passphrase has to be in the "
            "agent: ssh-add."
        ) from error
    except TimeoutError as error:
        raise ServerUnavailableError(
            f"{route.host} does not answer within {LOGIN_SECONDS:g} s."
        ) from error
    except socket.gaierror as error:
        raise ServerUnavailableError(
            f"The address of {route.host} can't be found: {error.strerror}. Is there a network, "
            "and a `Host` of that name in the ssh configuration?"
        ) from error
    except ConnectionRefusedError as error:
        raise ServerUnavailableError(
            f"{route.host} refuses ssh connections. Does sshd run there, at that port?"
        ) from error
    except (asyncssh.ConnectionLost, OSError) as error:
        raise ServerUnavailableError(f"{route.host} can't be reached: {error}.") from error
    except asyncssh.Error as error:
        raise ProviderError(f"ssh to {route.host} does not work: {error}.") from error
    except (ValueError, ImportError) as error:  # asyncssh's for values and modules it lacks
        raise ConfigError(f"The ssh configuration of {route.host}: {error}.") from error


async def _connected(route: SSHRoute) -> Connected:
    ended = asyncio.get_running_loop().create_future()
    return await _connect(route, ended), ended


async def _connect(
    route: SSHRoute,
    ended: asyncio.Future[Exception | None],
    *,
    via: asyncssh.SSHClientConnection | None = None,
    username: str | tuple[()] = (),
    port: int | tuple[()] = (),
) -> asyncssh.SSHClientConnection:
    """Log in, over the machines of `ProxyJump`, each of them known.

    Args:
        ended: is told why the login ended.
    """
    import asyncssh

    class Client(asyncssh.SSHClient):
        def connection_lost(self, exc: Exception | None) -> None:
            if not ended.done():
                ended.set_result(exc)

    try:
        options = await asyncssh.SSHClientConnectionOptions.construct(
            host=route.host, username=username, port=port, config=_configs(route)
        )
    except OSError as error:
        raise ConfigError(f"The ssh configuration of {route.host}: {error}.") from error
    config, jumps = options.config, options.tunnel
    if via is None and isinstance(jumps, str):
        for jump in jumps.removeprefix("ssh://").split(","):
            user, _, address = jump.rpartition("@")
            name, _, number = address.partition(":")
            if name == route.host:  # `Host *` has itself for a jump
                continue
            via = await _connect(
                SSHRoute(host=name, config=route.config),
                asyncio.get_running_loop().create_future(),
                via=via,
                username=user or (),
                port=int(number) if number else (),
            )
    known = _known_hosts(config)
    try:
        connection = await asyncssh.connect(
            route.host,
            client_factory=Client,
            tunnel=via,
            options=options,
            known_hosts=asyncssh.read_known_hosts(known),
            encryption_algs=() if config.get("Ciphers") else FAST_CIPHERS,
            keepalive_interval=config.get("ServerAliveInterval") or KEEPALIVE_SECONDS,
            keepalive_count_max=config.get("ServerAliveCountMax") or KEEPALIVES,
        )
    except BaseException as error:
        if via is not None:
            via.close()
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            raise _stranger(route, options, known) from error
        raise
    if via is not None:
        connection.set_tunnel(via)  # ends with it
    return connection


def _stranger(
    route: SSHRoute, options: asyncssh.SSHClientConnectionOptions, known: Sequence[str]
) -> ProviderError:
    """What to say of a host key that is not the known one, or not known at all."""
    import asyncssh

    port = None if options.port == asyncssh.DEFAULT_PORT else options.port
    name = options.host_key_alias or options.host
    files = " and ".join(known) or KNOWN_HOSTS[0]
    if any(asyncssh.read_known_hosts(known).match(name, "", port)[0]):
        return ProviderError(
            f"{route.host} shows another host key than the one in {files}: it is another machine, "
            "a new one under an old address, or somebody in between. If you know why, remove the "
            f"old key (ssh-keygen -R '{name if port is None else f'[{name}]:{port}'}') and look at "
            f"the new one: {shlex.join(route.command)}"
        )
    return ProviderError(
        f"The host key of {route.host} is not known: it is not in {files}. Log in once by hand, "
        f"compare the fingerprint and accept it: {shlex.join(route.command)}"
    )


def _known_hosts(config: asyncssh.config.SSHConfig) -> list[str]:
    """The files of known host keys that there are."""
    files: list[str] = []
    for option, default in (
        ("UserKnownHostsFile", KNOWN_HOSTS),
        ("GlobalKnownHostsFile", GLOBAL_KNOWN_HOSTS),
    ):
        chosen = config.get(option, default)
        assert isinstance(chosen, list | tuple)
        files += [str(Path(path).expanduser()) for path in chosen]
    return [path for path in files if Path(path).is_file()]


def _configs(route: SSHRoute) -> list[str]:
    """The configuration files that `ssh` would read for the route."""
    if route.config is not None:
        return [str(Path(route.config).expanduser())]
    paths = [Path(name).expanduser() for name in CONFIGS]
    return [str(path) for path in paths if path.is_file()]


class _Login:
    """Connections over asyncssh, each a channel of one login."""

    client = "asyncssh"

    def __init__(
        self,
        route: SSHRoute,
        port: int,
        connection: asyncssh.SSHClientConnection,
        ended: asyncio.Future[Exception | None],
    ) -> None:
        self._route = route
        self._port = port
        self._connection = connection
        self._ended = ended
        here = connection.get_extra_info("sockname")
        self.address: str | None = here[0] if here else None

    async def open(self, end: End) -> None:
        import asyncssh

        try:
            await self._connection.create_connection(
                lambda: cast("asyncssh.SSHTCPSession[bytes]", end), "127.0.0.1", self._port
            )
        except asyncssh.ChannelOpenError as error:
            if self._connection.is_closed() or error.reason == CLOSED:
                raise LinkLostError from error
            if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
                raise ProviderError(
                    f"{self._route.host} does not let this user forward ports: AllowTcpForwarding "
                    "and PermitOpen in its sshd_config, or restrictions of the key in its "
                    "authorized_keys."
                ) from error
            raise ServerUnavailableError(
                f"Nothing listens at port {self._port} of {self._route.host} ({error.reason})."
            ) from error

    async def lost(self) -> str:
        error = await self._ended
        return f"the connection was lost ({error or 'given up here'})"

    def close(self) -> None:
        self._connection.abort()


class _Command:
    """Connections over `ssh -N -L`, from a socket in a folder of its own."""

    client = "ssh"
    address: str | None = None

    def __init__(
        self,
        host: str,
        folder: tempfile.TemporaryDirectory[str],
        socket: Path,
        process: asyncio.subprocess.Process,
    ) -> None:
        self._host = host
        self._folder = folder
        self._socket = socket
        self._process = process
        self._said = ""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, route: SSHRoute, port: int) -> _Command:
        folder = tempfile.TemporaryDirectory(prefix="art-ssh-")
        socket = Path(folder.name) / "port"
        process = await asyncio.create_subprocess_exec(
            "ssh",
            *route.options,
            *("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"),
            *("-o", "ExitOnForwardFailure=yes", "-o", f"ConnectTimeout={LOGIN_SECONDS:.0f}"),
            *("-o", f"ServerAliveInterval={KEEPALIVE_SECONDS}"),
            *("-o", f"ServerAliveCountMax={KEEPALIVES}"),
            *("-N", "-T", "-L", f"{socket}:127.0.0.1:{port}", "--", route.host),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        link = cls(route.host, folder, socket, process)
        try:
            await link._logged_in()
        except BaseException:
            link.close()
            raise
        return link

    async def _logged_in(self) -> None:
        try:
            async with asyncio.timeout(2 * LOGIN_SECONDS):
                while not self._socket.exists():  # it is made after the login
                    if self._process.returncode is not None:
                        await self._reading
                        raise self._failure()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise ServerUnavailableError(f"ssh to {self._host} does not get through.") from None

    def _failure(self) -> ArtCloudError:
        final = ("Permission denied", "verification failed", "Bad configuration", "Too many auth")
        kind = ProviderError if any(word in self._said for word in final) else None
        return (kind or ServerUnavailableError)(f"ssh {self._host} ended: {self._said}")

    async def _read(self) -> None:
        """Keep the last thing that ssh said."""
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._said = line.decode(errors="replace").strip() or self._said
        await self._process.wait()

    async def open(self, end: End) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: end, str(self._socket))
        except OSError as error:
            raise LinkLostError from error

    async def lost(self) -> str:
        await self._reading
        return f"ssh ended: {self._said or self._process.returncode}"

    def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        self._folder.cleanup()
