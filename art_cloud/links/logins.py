"""Logins of the system's `ssh`, which carry connections to ports of another machine's loopback.

`ssh` reads the user's configuration, checks host keys, which are never accepted here (that is what
a first `ssh HOST` is for), and asks nothing. It is the master of a socket by which it is asked for
connections, one by one, as PROTOCOL.mux of OpenSSH's source describes:
https://github.com/openssh/openssh-portable/blob/master/PROTOCOL.mux
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import socket
import struct
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from ..shared.errors import ArtCloudError, ConfigError, ProviderError, ServerUnavailableError
from .endpoint import SSHRoute

LOGIN_SECONDS = 30.0
"""A `ProxyCommand` may take long to start: SkyPilot's is Python that imports all of SkyPilot."""
KEEPALIVE_SECONDS = 5
"""Unless the ssh configuration says otherwise. ssh gives up after three that nobody answered."""
REASON_SECONDS = 1.0
"""For ssh to write why it could not connect, after it said that it could not."""
LONGEST_SHELF = 60
"""The most bytes in the name of the folder for temporary files. macOS has 104 for the path of a
socket, of which ours take 24 and ssh, while it makes the socket, 17."""
TURNS = 32
"""How many may call ssh at the same time: a socket has 64 seats for those who wait."""
NEVER_ASK = ("-o", "BatchMode=yes", "-o", "LogLevel=INFO")
NEVER_ACCEPT = ("-o", "StrictHostKeyChecking=yes", "-o", "UpdateHostKeys=no")
ONLY_CONNECTIONS = (
    *("-N", "-T", "-o", "ControlMaster=yes", "-o", "ControlPersist=no"),
    *("-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=yes"),
    *("-o", "LocalCommand=echo in"),  # the word that the login is made
)
UNTIL_WE_END = '"$@" & exec >&- 2>&-; read _; rm -rf "$0"; kill -9 0'
"""A shell script that removes its folder ($0) and ends a command with all of its children once
nobody holds the standard input open any more: so it is when this process ends, however it ends."""

HELLO, VERSION = 1, 4
CONNECT, CONNECTED = 0x10000008, 0x80000006
"""Messages of PROTOCOL.mux: MUX_MSG_HELLO, MUX_C_NEW_STDIO_FWD, MUX_S_SESSION_OPENED."""

Settings = dict[str, list[str]]

_early: dict[SSHRoute, asyncio.Task[Login]] = {}


class LinkLostError(Exception):
    """The login ended; another one may be had."""


def read_settings(route: SSHRoute) -> Settings:
    """What the user's ssh would do for this host: every setting, in small letters, with its values.

    Raises:
        ConfigError: there is no ssh, or it does not understand its configuration.
    """
    ssh = require_system_ssh()
    found = subprocess.run(
        [ssh, *route.options, "-G", "-T", "--", route.host],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise ConfigError(f"ssh does not take {route.host!r}: {found.stderr.strip()}")
    settings: Settings = {}
    for line in found.stdout.splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key, []).append(value)
    return settings


def require_system_ssh() -> str:
    if ssh := shutil.which("ssh"):
        return ssh
    raise ConfigError("There is no ssh here. Install OpenSSH's client.")


def known_hosts(settings: Settings) -> list[Path]:
    """The files of known host keys that there are."""
    names = [
        name
        for key in ("userknownhostsfile", "globalknownhostsfile")
        for value in settings.get(key, [])
        for name in shlex.split(value)
    ]
    return [path for name in names if (path := Path(name).expanduser()).is_file()]


async def log_in(route: SSHRoute) -> Login:
    """Log in, or take the login that was begun early.

    Raises:
        ServerUnavailableError: the machine does not answer; it may later.
        ProviderError: it lets nobody in this way, or is not the machine that is known.
        ConfigError: there is no ssh, or its configuration can't be read.
    """
    early = _early.pop(route, None)
    if early is not None and early.get_loop() is asyncio.get_running_loop():
        with suppress(ArtCloudError):  # what is wrong shows at the next login
            login = await early
            if not login.ended:
                return login
            await login.close()
    return await Login.start(route)


def log_in_early(route: SSHRoute) -> None:
    """Begin the login that the next `log_in` there takes, or `forget_login` ends."""
    early = _early[route] = asyncio.create_task(Login.start(route))
    early.add_done_callback(lambda early: early.cancelled() or early.exception())  # no complaint


async def forget_login(route: SSHRoute) -> None:
    if early := _early.pop(route, None):
        early.cancel()
        with suppress(asyncio.CancelledError, ArtCloudError):
            await (await early).close()


async def check_login(route: SSHRoute) -> None:
    """Whether the login works, for a tunnel too. Raises what `log_in` and `Login.connect` raise."""
    login = await Login.start(route)
    try:
        with suppress(ServerUnavailableError), socket.socket() as nobody:
            await login.connect(1, nobody, nobody)  # where nothing listens, if one may ask
    finally:
        await login.close()


class Login:
    """One `ssh`, and the socket by which it is asked for connections."""

    def __init__(
        self,
        route: SSHRoute,
        settings: Settings,
        folder: tempfile.TemporaryDirectory[str],
        process: asyncio.subprocess.Process,
    ) -> None:
        self.ended = False
        self.address: str | None = None
        """The address of this machine that it goes out from, where that is known."""
        self._route = route
        self._settings = settings
        self._folder = folder
        self._process = process
        self._said: list[str] = []
        self._control = socket.socket(socket.AF_UNIX)
        """Ends with ssh."""
        self._turns = asyncio.Semaphore(TURNS)
        self._refused = asyncio.Event()
        self._why_refused = "no reason given"
        self._listening = asyncio.create_task(self._listen())
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, route: SSHRoute) -> Login:
        if not hasattr(socket, "AF_UNIX"):
            raise ConfigError(
                "A tunnel takes an ssh that shares logins, as Windows has in WSL only."
            )
        settings = await asyncio.to_thread(read_settings, route)
        shelf = tempfile.gettempdir()
        short = shelf if len(os.fsencode(shelf)) <= LONGEST_SHELF else "/tmp"  # noqa: S108
        folder = tempfile.TemporaryDirectory(prefix="art-ssh-", dir=short)
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", UNTIL_WE_END, folder.name, "ssh", *route.options),
            *(*NEVER_ASK, *NEVER_ACCEPT, *ONLY_CONNECTIONS, *_preferences(settings)),
            *("-S", f"{folder.name}/master", "--", route.host),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # nothing that is typed at a terminal ends it
        )
        login = cls(route, settings, folder, process)
        try:
            await login._made()
        except BaseException:
            await login.close()
            raise
        return login

    async def _made(self) -> None:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(LOGIN_SECONDS):
                await self._process.stdout.readline()
                await self._call(self._control)
        except TimeoutError:
            raise ServerUnavailableError(
                f"{self._route.host} does not answer within {LOGIN_SECONDS:g} s."
            ) from None
        except OSError:
            await self._why()
            raise refusal(self._route, self._settings, "\n".join(self._said)) from None
        self._ending = asyncio.create_task(self._end())
        self.address = await _own_address(self._settings)

    async def _listen(self) -> None:
        """Keep what ssh says."""
        assert self._process.stderr is not None
        rest = ""
        while data := await self._process.stderr.read(4096):
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            for line in lines:
                _, failed, why = line.strip().partition(": open failed: ")
                if failed:
                    self._why_refused = why
                    self._refused.set()
                elif line.strip():
                    self._said = [*self._said[-40:], line.strip()]

    async def connect(self, port: int, source: socket.socket, sink: socket.socket) -> socket.socket:
        """Have ssh read from `source` what goes to a port there, and write to `sink` what comes.

        Returns:
            A socket whose end is the connection's, either way round.

        Raises:
            LinkLostError: the login has ended.
            ServerUnavailableError: nothing listens there.
            ProviderError: the machine does not allow it.
        """
        host = b"127.0.0.1"
        request = struct.pack(f">IIII{len(host)}sI", CONNECT, 0, 0, len(host), host, port)
        control = socket.socket(socket.AF_UNIX)
        try:
            await self._call(control, request, source, sink)
            answer = await _receive(control)
            if struct.unpack_from(">I", answer) != (CONNECTED,):
                raise await self._not_connected(port)
        except OSError as error:
            control.close()
            raise LinkLostError from error
        except BaseException:
            control.close()
            raise
        return control

    async def _call(
        self, control: socket.socket, request: bytes = b"", *ends: socket.socket
    ) -> None:
        """Connect to ssh, ask it for something at once, and wait for its greeting."""
        control.setblocking(False)
        async with self._turns:
            control.connect(f"{self._folder.name}/master")
            for message in (struct.pack(">II", HELLO, VERSION), request) if request else ():
                control.sendall(struct.pack(">I", len(message)) + message)
            for end in ends:
                socket.send_fds(control, [b"\0"], [end.fileno()])
            await _receive(control)

    async def _not_connected(self, port: int) -> ArtCloudError:
        host = self._route.host
        with suppress(TimeoutError):
            await asyncio.wait_for(self._refused.wait(), REASON_SECONDS)
        if self._why_refused.startswith("administratively prohibited"):
            return ProviderError(
                f"{host} does not let this user forward ports: AllowTcpForwarding and PermitOpen "
                "in its sshd_config, or restrictions of the key in its authorized_keys."
            )
        return ServerUnavailableError(
            f"Nothing listens at port {port} of {host} ({self._why_refused})."
        )

    async def is_alive(self) -> bool:
        """Whether ssh still answers: then what it ended was ended on the other machine."""
        with socket.socket(socket.AF_UNIX) as control, suppress(OSError):
            await self._call(control)
            return True
        return False

    async def lost(self) -> str:
        """Wait until the login ended, and return why."""
        assert self._ending is not None
        await asyncio.shield(self._ending)
        return f"the connection was lost ({await self._why()})"

    async def _end(self) -> None:
        with suppress(OSError):
            await asyncio.get_running_loop().sock_recv(self._control, 1)
        self.ended = True

    async def _why(self) -> str:
        """The last thing that ssh said, once it has ended."""
        ends = [self._listening, *([self._ending] if self._ending else [])]
        await asyncio.wait(ends, timeout=REASON_SECONDS)  # another program may hold its stderr
        return self._said[-1] if self._said else "ssh ended"

    async def close(self) -> None:
        self.ended = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._folder.cleanup()
        await self._process.wait()
        await self._why()
        for task in (self._listening, self._ending):
            if task is not None:
                task.cancel()
        self._control.close()


async def _receive(control: socket.socket) -> bytes:
    """A message of the master's."""
    loop = asyncio.get_running_loop()

    async def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = await loop.sock_recv(control, size - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return data

    return await exactly(struct.unpack(">I", await exactly(4))[0])


def _preferences(settings: Settings) -> list[str]:
    """What we would rather have where the configuration leaves it open."""
    # processors have instructions for GCM, as they have not for chacha20, ssh's first choice
    ciphers = sorted(settings["ciphers"][0].split(","), key=lambda name: "gcm@" not in name)
    options = ["-o", f"Ciphers={','.join(ciphers)}"]
    if settings["serveraliveinterval"] == ["0"]:
        options += ["-o", f"ServerAliveInterval={KEEPALIVE_SECONDS}"]
    if settings.get("forkafterauthentication") == ["yes"]:  # older ones don't know it
        options += ["-o", "ForkAfterAuthentication=no"]
    return options


async def _own_address(settings: Settings) -> str | None:
    """The address of this machine from which it reaches the host, where it does so directly."""
    if "proxyjump" in settings or "proxycommand" in settings:
        return None
    try:
        [(family, _, _, _, address), *_] = await asyncio.get_running_loop().getaddrinfo(
            settings["hostname"][0], int(settings["port"][0]), type=socket.SOCK_DGRAM
        )
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def refusal(route: SSHRoute, settings: Settings, text: str) -> ArtCloudError:
    """What to say of a login that ssh did not get, by what it wrote."""
    host, by_hand = route.host, shlex.join(route.command)
    last = text.strip().rpartition("\n")[2] or "ssh ended"
    files = " and ".join(map(str, known_hosts(settings))) or "~/.ssh/known_hosts"
    if "HOST IDENTIFICATION HAS CHANGED" in text or "REVOKED HOST KEY" in text:
        [name], [port] = settings.get("hostkeyalias") or settings["hostname"], settings["port"]
        key = name if port == "22" else f"[{name}]:{port}"
        return ProviderError(
            f"{host} shows another host key than the one in {files}: it is another machine, "
            "a new one under an old address, or somebody in between. If you know why, remove the "
            f"old key (ssh-keygen -R '{key}') and look at the new one: {by_hand}"
        )
    if "Host key verification failed" in text:
        return ProviderError(
            f"The host key of {host} is not known: it is not in {files}. Log in once by hand, "
            f"compare the fingerprint and accept it: {by_hand}"
        )
    if "Permission denied" in text or "Too many authentication failures" in text:
        return ProviderError(
            f"{host} does not let this user in: {last}. See whether `{by_hand}` works without "
            "a question. A key with a passphrase has to be in the agent: ssh-add."
        )
    if "Could not resolve hostname" in text:
        return ServerUnavailableError(
            f"The address of {host} can't be found: {last}. Is there a network, and a `Host` "
            "of that name in the ssh configuration?"
        )
    if "Connection refused" in text:
        return ServerUnavailableError(
            f"{host} refuses ssh connections. Does sshd run there, at that port?"
        )
    return ServerUnavailableError(f"{host} can't be reached: {last}.")
