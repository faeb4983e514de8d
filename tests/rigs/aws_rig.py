"""The real SkyPilot with an AWS whose machines are namespaces of this one.

    with AwsRig(tmp_path) as rig:
        subprocess.run([rig.python, "-m", "sky.cli", "status"], env=os.environ | rig.environment)

EC2, IAM, STS and S3 are moto's (`aws_cloud.py`); SkyPilot's API server, its provisioner and what
it installs on a machine are real, sshd and ray included. All of it ends with the rig: one end of a
cable into its network is the only thing of it that this machine sees, and goes with the network.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import random
import secrets
import sys
from ipaddress import IPv4Network
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import boto3
import pytest

from .namespaces import SBIN, Rig, missing, write
from .sshd import SSHD

ROOT = Path(__file__).parents[2]
PYTHON = Path(
    os.environ.get("ART_TEST_SKYPILOT_AWS_PYTHON", ROOT / ".venv-skypilot-aws" / "bin" / "python")
)
TOOLS = ("ip", "nsenter", "rsync", "nc", "unshare", "setpriv")
ZONES = ("us-east-1a", "us-east-1b", "us-west-2a", "us-west-2b")
PRICES = {"us-east-1": (1.0, 0.3), "us-west-2": (1.2, 0.5)}
"""US dollars an hour of a machine in each region: on demand, spot."""
MACHINE = "g6.2xlarge"
"""The only kind there is, with a GPU of type L4."""
NAME = "skypilot-cluster-name"
"""The tag with the name of an instance's cluster."""
KEYS = {"aws_access_key_id": "AKIAMOTO", "aws_secret_access_key": "moto-secret"}

needs_aws_rig = pytest.mark.skipif(
    bool(missing(*TOOLS)) or SSHD is None or os.geteuid() != 0 or not PYTHON.exists(),
    reason="SkyPilot on AWS takes root, make .venv-skypilot-aws, and iproute2 rsync "
    "netcat-openbsd openssh-server",
)


class AwsRig(Rig):
    """An AWS account with two regions of two zones that SkyPilot knows, while the block runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, PYTHON)
        # 198.18.0.0/15 is for measurements, so nothing else is there
        self.network = random.choice(list(IPv4Network("198.18.0.0/15").subnets(new_prefix=24)))
        self._cloud, self._here = (f"{self.network[number]}/24" for number in (1, 2))
        self._cable = f"aws{secrets.token_hex(4)}"
        for name in (
            *("home/.aws", "home/.sky", "disks"),
            *("image/etc/ssh", "image/usr/local/bin", "image/home/ubuntu/.local/bin"),
        ):
            (folder / name).mkdir(parents=True, mode=0o700)

    @property
    def endpoint(self) -> str:
        return f"http://{self.network[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """For whoever uses SkyPilot or this AWS here."""
        direct = f"{os.environ.get('NO_PROXY', '')},{self.network}"
        return {**super().environment, "NO_PROXY": direct}

    def __enter__(self) -> AwsRig:
        self._write()
        self.refuse_nothing()
        ours = {key: it for key, it in os.environ.items() if not key.startswith("AWS_")}
        self._start({**ours, **self.environment, "PATH": f"{PYTHON.parent}:{SBIN}"}, "up")
        try:
            self._write_catalog(self._make_account())
        except BaseException:
            self.__exit__()
            raise
        (self.folder / "made").touch()
        self._wait("ready")
        return self

    def refuse(self, code: str, *zones: str, market: str | None = None) -> None:
        """EC2 starts nothing more in these zones (of this market), and says so with this code."""
        rule = {"code": code, "zones": zones, "market": market}
        self._refusals.append(rule)
        self._write_refusals()

    def refuse_nothing(self) -> None:
        self._refusals: list[dict[str, Any]] = []
        self._write_refusals()
        self._heard = self.log.stat().st_size if self.log.exists() else 0

    def asked(self) -> set[tuple[str, str]]:
        """The zones and markets that machines were asked of since `refuse_nothing`."""
        lines = self.log.read_text()[self._heard :].split("\n")
        words = [line.split() for line in lines if line.startswith("RunInstances ")]
        return {(zone, market) for _, _, zone, market in words}

    def _write_refusals(self) -> None:
        new = self.folder / "refusals.new"
        new.write_text(json.dumps(self._refusals))
        new.rename(self.folder / "refusals.json")

    def ec2(self, region: str) -> Any:
        return boto3.client("ec2", region_name=region, endpoint_url=self.endpoint, **KEYS)

    def make_bucket(self) -> str:
        """The name of a new bucket."""
        bucket = f"bucket-{secrets.token_hex(8)}"
        s3 = boto3.client("s3", region_name="us-east-1", endpoint_url=self.endpoint, **KEYS)
        s3.create_bucket(Bucket=bucket)
        return bucket

    async def sky(self, *arguments: str) -> None:
        """SkyPilot by hand."""
        command = (str(PYTHON.with_name("sky")), *arguments)
        process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL)
        assert await process.wait() == 0

    def instances(self, cluster: str = "") -> list[dict[str, Any]]:
        """Those of clusters that are not terminated, as EC2 describes them."""
        return [
            instance
            for region in PRICES
            for reservation in self.ec2(region).describe_instances()["Reservations"]
            for instance in reservation["Instances"]
            if instance["State"]["Name"] != "terminated"
            and name_of(instance).startswith(f"art-cloud-{cluster}")
        ]

    def terminate(self, instances: list[dict[str, Any]]) -> None:
        """Their machines are taken away."""
        for instance in instances:
            ec2 = self.ec2(zone_of(instance)[:-1])
            ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])

    def open_ports(self, instance: dict[str, Any]) -> set[int | None]:
        """Those that anyone from elsewhere may use, None for all of them."""
        groups = [group["GroupId"] for group in instance["SecurityGroups"]]
        ec2 = self.ec2(zone_of(instance)[:-1])
        found = ec2.describe_security_groups(GroupIds=groups)["SecurityGroups"]
        rules = [rule for group in found for rule in group["IpPermissions"]]
        elsewhere = [rule for rule in rules if rule["IpRanges"] or rule["Ipv6Ranges"]]
        return {rule.get("FromPort") for rule in elsewhere}

    def _write(self) -> None:
        at = self.folder
        write(
            self.home / ".aws" / "credentials",
            "[default]\n" + "".join(f"{key} = {value}\n" for key, value in KEYS.items()),
        )
        write(
            self.home / ".aws" / "config",
            f"""
            [default]
            region = us-east-1
            endpoint_url = {self.endpoint}
            """,
        )
        self._write_user()
        write(
            self.home / ".sky" / "config.yaml",
            """
            aws:
              vpc_name: machines
              use_internal_ips: true
              use_ssm: false
            """,
        )
        self._write_image()
        shared = (ROOT, sys.base_prefix, *at.parents[:2])
        cloud = (sys.executable, ROOT / "tests" / "rigs" / "aws_cloud.py", at, self._cloud, *shared)
        write(
            at / "init.sh",
            f"""
            set -eu
            mount -t tmpfs tmpfs /run
            mount -t tmpfs tmpfs {at}/disks
            ip netns add cloud
            ip link add {self._cable} type veth peer outside netns cloud
            ip address add {self._here} dev {self._cable}
            ip link set {self._cable} up
            ip netns exec cloud {" ".join(str(word) for word in cloud)} &
            until nc -z {self.network[1]} 80; do sleep 0.1; done
            touch {at}/up
            until [ -e {at}/made ]; do sleep 0.1; done
            {PYTHON.parent}/sky api start --foreground --host 127.0.0.1 &
            until nc -z 127.0.0.1 {self.port}; do sleep 0.1; done
            touch {at}/ready
            wait -n  # neither may end
            """,
        )

    def _write_image(self) -> None:
        """What a machine's disk has on top of this one's: as in SkyPilot's own images, uv, ray and
        what SkyPilot needs are there."""
        image = self.folder / "image"
        environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "OMP_NUM_THREADS": "1",
            "PATH": SBIN,
            "UV_OFFLINE": "1",
        }
        write(
            image / "etc/ssh/sshd_config",
            f"""
            PasswordAuthentication no
            KbdInteractiveAuthentication no
            UsePAM no
            StrictModes no
            PidFile /run/sshd.pid
            HostKey /etc/ssh/ssh_host_ed25519_key
            Subsystem sftp internal-sftp
            SetEnv {" ".join(f"{key}={value}" for key, value in environment.items())}
            """,
        )
        users, shadow = (Path("/etc", name).read_text() for name in ("passwd", "shadow"))
        write(image / "etc/passwd", f"ubuntu:x:0:0::/home/ubuntu:/bin/bash\n{users}")
        write(image / "etc/shadow", f"ubuntu:*:19000:0:99999:7:::\n{shadow}")
        write(
            image / "usr/local/bin/sudo",
            """
            #!/bin/bash
            while [ "${1:0:1}" = - ]; do shift; done
            exec env "$@"
            """,
        )
        (image / "usr/local/bin/sudo").chmod(0o755)
        home = image / "home/ubuntu"
        (home / ".local/bin/uv").symlink_to(Path(sys.executable).with_name("uv"))
        (home / "skypilot-runtime").symlink_to(PYTHON.parents[1])

    def _make_account(self) -> dict[str, str]:
        """Subnets, a role for machines, an image. Returns the image's name in each region."""
        iam = boto3.client("iam", region_name="us-east-1", endpoint_url=self.endpoint, **KEYS)
        iam.create_role(RoleName="skypilot-v1", AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName="skypilot-v1")
        iam.add_role_to_instance_profile(InstanceProfileName="skypilot-v1", RoleName="skypilot-v1")
        subnets = dict(zip(ZONES, self.network.subnets(new_prefix=26), strict=True))
        images = {}
        for region in PRICES:
            ec2 = self.ec2(region)
            vpc = ec2.create_vpc(CidrBlock=str(self.network))["Vpc"]["VpcId"]
            ec2.create_tags(Resources=[vpc], Tags=[{"Key": "Name", "Value": "machines"}])
            for zone, subnet in subnets.items():
                if zone.startswith(region):
                    ec2.create_subnet(VpcId=vpc, CidrBlock=str(subnet), AvailabilityZone=zone)
            disk = ec2.create_volume(AvailabilityZone=f"{region}a", Size=30)["VolumeId"]
            snapshot = ec2.create_snapshot(VolumeId=disk)["SnapshotId"]
            images[region] = ec2.register_image(
                Name="machine",
                Architecture="x86_64",
                RootDeviceName="/dev/sda1",
                BlockDeviceMappings=[
                    {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 30, "SnapshotId": snapshot}}
                ],
            )["ImageId"]
        return images

    def _write_catalog(self, images: dict[str, str]) -> None:
        """SkyPilot's list of machines and prices, which is not part of its package."""
        zones = {
            zone["ZoneName"]: zone["ZoneId"]
            for region in PRICES
            for zone in self.ec2(region).describe_availability_zones()["AvailabilityZones"]
        }
        gpu = (
            "{'Gpus': [{'Name': 'L4', 'Manufacturer': 'NVIDIA', 'Count': 1.0, "
            "'MemoryInfo': {'SizeInMiB': 22888}}], 'TotalGpuMemoryInMiB': 22888}"
        )
        machines = [
            [
                MACHINE,
                "L4",
                1.0,
                8.0,
                32.0,
                gpu,
                *PRICES[zone[:-1]],
                zone[:-1],
                zones[zone],
                "x86_64",
            ]
            for zone in ZONES
        ]
        tags = [f"skypilot:custom-{kind}-ubuntu" for kind in ("cpu", "gpu")]
        tags.append("skypilot:custom-gpu-ubuntu-cuda13")
        catalog = self.home / ".sky" / "catalogs" / "v8"
        for name, rows in {
            "common/accelerators": [["AcceleratorName", "Clouds"], ["L4", "['AWS']"]],
            "common/metadata": [["GPU", "MemoryGB", "Manufacturer"], ["L4", "24", "Nvidia"]],
            "aws/vms": [
                [
                    *("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB"),
                    *("GpuInfo", "Price", "SpotPrice", "Region", "AvailabilityZone", "Arch"),
                ],
                *machines,
            ],
            "aws/images": [
                ["Tag", "Region", "OS", "OSVersion", "ImageId", "CreationDate"],
                *(
                    [tag, region, "ubuntu", "22.04", image, "20260101"]
                    for tag in tags
                    for region, image in images.items()
                ),
            ],
            "aws/instance_quota_mapping": [
                ["InstanceType", "SpotInstanceCode", "OnDemandInstanceCode"]
            ],
        }.items():
            path = catalog / f"{name}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="") as file:
                csv.writer(file).writerows(rows)


def name_of(instance: dict[str, Any]) -> str:
    return next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == NAME)


def zone_of(instance: dict[str, Any]) -> str:
    return str(instance["Placement"]["AvailabilityZone"])
