"""A real sshd with keys of its own: on loopback, or behind a network that can be cut.

    with Sshd(tmp_path) as sshd:
        subprocess.run(["ssh", "-F", sshd.config, sshd.host, "true"])

It lets this user in, as the machine `gpu-box` of the ssh configuration `sshd.config`.
"""

from __future__ import annotations

import getpass
import ipaddress
import os
import random
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from art_cloud.links.endpoint import SSHRoute

from .waiting import wait_until

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
START_SECONDS = 20.0

needs_sshd = pytest.mark.skipif(SSHD is None, reason="there is no sshd: install openssh-server")
needs_namespaces = pytest.mark.skipif(
    SSHD is None or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="a network namespace takes root, iproute2 and openssh-server",
)


class Sshd:
    """It listens while the `with` block runs; its port and keys stay the same over `stop`."""

    host = "gpu-box"
    address = "127.0.0.1"

    def __init__(self, folder: Path, *options: str) -> None:
        """Args:
        options: lines of sshd_config that come before those here, and so win.
        """
        self.folder = folder
        self.options = options
        self.config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        self.log = folder / "sshd.log"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Sshd:
        make_key(self.folder / "host_key")
        make_key(self.folder / "client_key")
        while not self._try_port():
            pass
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _try_port(self) -> bool:
        """Whether sshd could have the port that was free a moment before."""
        self.port = self._free_port()
        self._write_configs()
        self._launch()
        wait_until(lambda: self._listens() or self._ended(), START_SECONDS)
        taken = self._ended()
        assert not taken or "Address already in use" in self.log.read_text(), self.log.read_text()
        return not taken

    def _free_port(self) -> int:
        with socket.socket() as taken:
            taken.bind((self.address, 0))
            return int(taken.getsockname()[1])

    def _write_configs(self) -> None:
        key = (self.folder / "host_key.pub").read_text()
        self.known_hosts.write_text(f"[{self.address}]:{self.port} {key}")
        lines = [
            *self.options,
            f"ListenAddress {self.address}:{self.port}",
            f"HostKey {self.folder / 'host_key'}",
            f"AuthorizedKeysFile {self.folder / 'client_key.pub'}",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "MaxSessions 100",
            "MaxStartups 100",
            "AllowTcpForwarding yes",
            "Subsystem sftp internal-sftp",
            f"PidFile {self.folder / 'sshd.pid'}",
        ]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")
        self.config.write_text(
            f"Host {self.host}\n"
            f"  HostName {self.address}\n"
            f"  Port {self.port}\n"
            f"  User {getpass.getuser()}\n"
            f"  IdentityFile {self.folder / 'client_key'}\n"
            "  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n"
            "  StrictHostKeyChecking yes\n"
        )

    def start(self) -> None:
        self._launch()
        wait_until(lambda: self._listens() or self._ended(), START_SECONDS)
        assert not self._ended(), self.log.read_text()

    def _launch(self) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd won't start without
        assert SSHD is not None
        command = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._enter(), *DIES_WITH_US, *command], stderr=log, stdin=subprocess.DEVNULL
            )

    def _enter(self) -> list[str]:
        """The command that takes another to where sshd runs."""
        return []

    def _listens(self) -> bool:
        return b"Server listening" in self.log.read_bytes()

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def stop(self) -> None:
        """End sshd and all of its sessions, as a reboot would."""
        if self._process is not None and self._process.poll() is None:
            sessions = self.sessions
            self._process.kill()
            self._process.wait()
            kill(sessions)

    def kill_sessions(self) -> int:
        """Kill every session; the listener stays. Returns how many processes that were."""
        sessions = self.sessions
        kill(sessions)
        return len(sessions)

    @property
    def route(self) -> SSHRoute:
        return SSHRoute(host=self.host, config=str(self.config))

    @property
    def logins(self) -> int:
        """How many there were since it was started."""
        return self.log.read_text().count("Accepted publickey")

    @property
    def sessions(self) -> list[psutil.Process]:
        assert self._process is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        return [child for child in children if is_sshd(child)]


class NamespaceSshd(Sshd):
    """An sshd in a network namespace of its own, at the other end of a cable.

    Namespace and cable go with their processes, and those with this one. What shall be reached
    through the sshd has to listen in there: see `namespace`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, *options)
        self._holder: subprocess.Popen[bytes] | None = None
        # 198.18.0.0/15 is for measurements, so nothing else is there
        network = ipaddress.ip_network("198.18.0.0/15")
        start = int(network.network_address) + 8 * random.randrange(network.num_addresses // 8)
        self.address, self._here, self._elsewhere = (
            str(ipaddress.ip_address(start + number)) for number in (1, 2, 3)
        )
        self._cable = f"art{start:x}"

    @property
    def namespace(self) -> str:
        """The path of the namespace, for `nsenter --net=` and setns(2)."""
        assert self._holder is not None
        return f"/proc/{self._holder.pid}/ns/net"

    def __enter__(self) -> NamespaceSshd:
        self._holder = subprocess.Popen([*DIES_WITH_US, "unshare", "--net", "sleep", "infinity"])
        try:
            ours = os.stat("/proc/self/ns/net").st_ino
            wait_until(lambda: os.stat(self.namespace).st_ino != ours, START_SECONDS)
            there = f"{self._cable}t"
            run("ip", "link", "add", self._cable, "type", "veth", "peer", there)
            run("ip", "link", "set", there, "netns", str(self._holder.pid))
            run("ip", "address", "add", f"{self._here}/29", "dev", self._cable)
            run("ip", "link", "set", self._cable, "up")
            run(*self._enter(), "ip", "link", "set", there, "name", "eth0")
            run(*self._enter(), "ip", "address", "add", f"{self.address}/29", "dev", "eth0")
            run(*self._enter(), "ip", "link", "set", "lo", "up")
            self.restore()
            super().__enter__()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()
        with suppress(subprocess.CalledProcessError):  # it went with the namespace
            run("ip", "link", "delete", self._cable)

    def _enter(self) -> list[str]:
        return ["nsenter", f"--net={self.namespace}"]

    def _free_port(self) -> int:
        return 2222  # a network of its own

    def cut(self) -> None:
        """Packets go nowhere from now on, and nobody is told."""
        run(*self._enter(), "ip", "link", "set", "eth0", "down")

    def restore(self) -> None:
        run(*self._enter(), "ip", "link", "set", "eth0", "up")

    def move(self) -> None:
        """This machine is in another network: it has another address, and not the old one."""
        run("ip", "address", "add", f"{self._elsewhere}/29", "dev", self._cable)
        run("ip", "address", "delete", f"{self._here}/29", "dev", self._cable)
        # Linux may have made the new one an alias of the old
        subprocess.run(
            ["ip", "address", "add", f"{self._elsewhere}/29", "dev", self._cable],
            capture_output=True,
            check=False,
        )


DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def make_key(path: Path) -> None:
    if not path.exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def is_sshd(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.name().startswith("sshd")
    return False


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=10)
