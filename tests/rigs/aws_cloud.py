"""An AWS in a network namespace of its own: moto, where a running EC2 instance is a machine.

    python aws_cloud.py FOLDER ADDRESS/PREFIX SHARED...

A machine has namespaces of its own, with an address of its subnet on the bridge of this one, an
sshd, and a disk of its own on top of this machine's. Its processes end with this program's PID
namespace. What RunInstances refuses stands in FOLDER/refusals.json: see `AwsRig.refuse`.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import moto.server
from moto.ec2 import ec2_backends
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.instances import Instance

BRIDGE = "machines"
LOOK_SECONDS = 0.1
SAYS = {
    "InsufficientInstanceCapacity": "We currently do not have sufficient {machine} capacity in the "
    "Availability Zone you requested ({zone}).",
    "MaxSpotInstanceCountExceeded": "Max spot instance count exceeded",
    "VcpuLimitExceeded": "You have requested more vCPU capacity than your current vCPU limit of 0 "
    "allows for the instance bucket that the specified instance type belongs to.",
}
"""What EC2 says with each code: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html."""
BOOT = """
set -eu
disk=$1 shared=$2
hostname "$3"
mount -t overlay overlay -o lowerdir=/,upperdir=$disk/changes,workdir=$disk/work $disk/root
for place in $shared; do
  [ -e $disk/root$place ] || { mkdir -p $disk/root$place; mount --rbind $place $disk/root$place; }
done
mount -t proc proc $disk/root/proc
for place in dev sys; do mount --rbind /$place $disk/root/$place; done
for place in dev/shm run; do mount -t tmpfs tmpfs $disk/root/$place; done
mkdir $disk/root/run/sshd
exec chroot $disk/root /usr/sbin/sshd -D -E /var/log/sshd.log
"""


class Machine:
    """The machine of an instance. Its disk stays while it is stopped."""

    def __init__(self, folder: Path, instance: Instance, gateway: str, shared: list[str]) -> None:
        self.name = instance.id
        self.address = f"{instance.private_ip}/{gateway.partition('/')[2]}"
        self.gateway = gateway.partition("/")[0]
        self.shared = shared
        self.disk = folder / "disks" / self.name
        for name in ("changes", "work", "root"):
            (self.disk / name).mkdir(parents=True)
        run("cp", "-a", f"{folder}/image/.", f"{self.disk}/changes")
        said = base64.b64decode(str(instance.user_data)).decode()
        [key] = re.findall(r"ssh-(?:rsa|ed25519) \S+", said)
        keys = self.disk / "changes/home/ubuntu/.ssh/authorized_keys"
        keys.parent.mkdir(mode=0o700)
        keys.write_text(f"{key}\n")
        host_key = self.disk / "changes/etc/ssh/ssh_host_ed25519_key"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key))
        self._process: subprocess.Popen[bytes] | None = None

    def be(self, *, on: bool) -> None:
        if on and self._process is None:
            self._start()
        elif not on and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            run("ip", "netns", "delete", self.name)

    def _start(self) -> None:
        cable = f"m{self.name[-10:]}"
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", cable, "type", "veth", "peer", "eth0", "netns", self.name)
        run("ip", "link", "set", cable, "master", BRIDGE, "up")
        for command in (
            f"address add {self.address} dev eth0",
            "link set lo up",
            "link set eth0 up",
            f"route add default via {self.gateway}",
        ):
            run("ip", "-n", self.name, *command.split())
        self._process = subprocess.Popen(
            [
                *("nsenter", f"--net=/run/netns/{self.name}"),
                *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
                *("bash", "-c", BOOT, "boot"),
                *(str(self.disk), " ".join(self.shared), self.name),
            ]
        )


def look(folder: Path, gateway: str, shared: list[str]) -> None:
    """Makes the machines what their instances are, for as long as this program runs."""
    machines: dict[str, Machine] = {}
    while True:
        for instance in instances():
            state = instance.state
            if state == "running" and instance.id not in machines:
                machines[instance.id] = Machine(folder, instance, gateway, shared)
            if machine := machines.get(instance.id):
                machine.be(on=state == "running")
        time.sleep(LOOK_SECONDS)


def instances() -> list[Instance]:
    backends = [region for account in ec2_backends.values() for region in account.values()]
    return [
        instance
        for backend in backends
        for reservation in list(backend.reservations.values())
        for instance in reservation.instances
    ]


def refuse(folder: Path) -> None:
    """RunInstances refuses what the file says, as EC2 does."""
    run_instances = EC2Backend.run_instances

    def limited(self: EC2Backend, *arguments: Any, **options: Any) -> Any:
        market = "spot" if options.get("instance_market_options") else "on-demand"
        zone = self.get_subnet(options["nics"][0]["SubnetId"]).availability_zone
        print("RunInstances", options["instance_type"], zone, market, flush=True)
        for rule in json.loads((folder / "refusals.json").read_text()):
            if rule["market"] in (None, market) and (not rule["zones"] or zone in rule["zones"]):
                says = SAYS[rule["code"]].format(machine=options["instance_type"], zone=zone)
                raise EC2ClientError(rule["code"], says)
        return run_instances(self, *arguments, **options)

    EC2Backend.run_instances = limited


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    folder, gateway, *shared = sys.argv[1:]
    refuse(Path(folder))
    # of its own it takes another MAC address when a machine goes, and others lose it for a minute
    run("ip", "link", "add", BRIDGE, "address", "02:00:00:00:00:01", "type", "bridge")
    # the second address is where a machine asks for its role: moto answers that too
    for address in (gateway, "169.254.169.254/32"):
        run("ip", "address", "add", address, "dev", BRIDGE)
    for link in ("lo", BRIDGE):
        run("ip", "link", "set", link, "up")
    run("ip", "link", "set", "outside", "master", BRIDGE, "up")
    listen = ["--host", "0.0.0.0", "--port", "80"]
    threading.Thread(target=moto.server.main, args=(listen,), daemon=True).start()
    look(Path(folder), gateway, shared)


if __name__ == "__main__":
    main()
