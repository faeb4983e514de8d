"""Which machines a cluster on ssh may use: the provider's options, and files of hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from ....links.endpoint import SSHRoute
from ....shared.config import Frozen
from ....shared.errors import ConfigError
from ...registry import home
from ...spec import ClusterSpec
from .. import kit

HOST = re.compile(r"[A-Za-z0-9_:\[][A-Za-z0-9_.@:%/\[\]-]*")


class Options(Frozen):
    """What `art.up("ssh", ...)` takes beside what all providers take."""

    host: str | None = None
    """As in `ssh HOST`."""
    hosts: tuple[str, ...] = ()
    """The first that answers, has no server of ours and fits is taken."""
    hosts_file: str | None = None
    """One host a line, in place of `hosts`."""
    ssh_config: str | None = None
    """In place of ~/.ssh/config, as in `ssh -F`."""
    python: str | None = None
    """A Python on the machine that has `art-cloud[server]`: then nothing is installed."""
    gpu: str | None = None
    """Part of the name that nvidia-smi shows: only a machine with such a GPU is taken."""
    min_memory_gb: PositiveFloat = 2.0
    price_per_hour: NonNegativeFloat = 0.0
    """US dollars that the machine costs you, for `budget` and for what is shown."""
    on_end: Literal["stay", "poweroff"] = "stay"
    """What the machine does once its server has ended, however it ended. A rented one that stays on
    goes on costing."""

    def routes(self) -> list[SSHRoute]:
        config = str(Path(self.ssh_config).expanduser().resolve()) if self.ssh_config else None
        if self.host is not None:
            hosts = [self.host]
        elif self.hosts:
            hosts = list(self.hosts)
        elif self.hosts_file is not None:
            hosts = _read_hosts(Path(self.hosts_file).expanduser())
        else:
            hosts = _read_hosts(default_hosts()) if default_hosts().exists() else []
        for host in hosts:
            if not HOST.fullmatch(host):
                raise ConfigError(f"{host!r} is not a host: write it as for ssh, without options.")
        return [SSHRoute(host=host, config=config) for host in dict.fromkeys(hosts)]


def default_hosts() -> Path:
    """The file of hosts that are used where none are named, and always looked at."""
    return home() / "ssh-hosts"


def options_of(spec: ClusterSpec) -> Options:
    return kit.options_of(spec, Options, "A cluster on ssh")


def routes_of(options: Options) -> list[SSHRoute]:
    """The hosts in the order in which they are tried; `ConfigError` if there are none."""
    routes = options.routes()
    if not routes:
        raise ConfigError(
            'A cluster on ssh needs a machine: host="gpu-box" (as in `ssh gpu-box`), hosts=[...], '
            f"hosts_file=..., or {default_hosts()} with one host a line."
        )
    return routes


def _read_hosts(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"The hosts in {path} can't be read: {error.strerror}.") from error
    return [host for line in lines if (host := line.partition("#")[0].strip())]
