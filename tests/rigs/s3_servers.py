"""Real S3 servers as processes of their own, over https on loopback.

moto keeps everything in memory, checks signatures and policies once `check_access` was called, and
takes conditional writes. OpenStack Swift keeps everything on disk, and lets several of the writers
that race for one key win.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen
from uuid import uuid4

import boto3
import pytest
import trustme
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

REGION = "us-east-1"
STARTING_SECONDS = 60.0


@dataclass(frozen=True)
class S3Server:
    endpoint_url: str
    ca: Path
    """The certificate that signed the server's."""
    certificate: Path
    key: Path
    access_key: str
    secret_key: str

    @property
    def env(self) -> dict[str, str]:
        """What makes boto3, and with it art-cloud, use this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_CA_BUNDLE": str(self.ca),
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def use(self, monkeypatch: pytest.MonkeyPatch, **others: str) -> None:
        """Make it what boto3 finds in this process, whatever its user has set."""
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in (self.env | others).items():
            monkeypatch.setenv(name, value)

    def make_bucket(self) -> str:
        """The name of a new bucket."""
        bucket = f"bucket-{uuid4().hex}"
        self.client().create_bucket(Bucket=bucket)
        return bucket

    def session(self) -> boto3.Session:
        return boto3.Session(self.access_key, self.secret_key, region_name=REGION)

    def client(self) -> S3Client:
        """A plain one, to look behind the store's back."""
        return self._client

    @cached_property
    def _client(self) -> S3Client:
        return self.session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            verify=str(self.ca),
            config=Config(request_checksum_calculation="when_required"),
        )

    def make_user(self, name: str, *statements: dict[str, object]) -> tuple[str, str]:
        """moto only: the access key and the secret of a new user with this policy."""
        iam = self.session().client("iam", endpoint_url=self.endpoint_url, verify=str(self.ca))
        iam.create_user(UserName=name)
        policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
        iam.put_user_policy(UserName=name, PolicyName="tests", PolicyDocument=policy)
        made = iam.create_access_key(UserName=name)["AccessKey"]
        return made["AccessKeyId"], made["SecretAccessKey"]

    def check_access(self, after: int = 0) -> None:
        """moto only: check signatures and policies, after so many more requests."""
        reset = Request(
            f"{self.endpoint_url}/moto-api/reset-auth",
            data=str(after).encode(),
            headers={"Content-Type": "text/plain"},
        )
        context = ssl.create_default_context(cafile=self.ca)
        with urlopen(reset, context=context) as answer:
            assert answer.status == 200


def make_certificate(folder: Path) -> tuple[Path, Path, Path]:
    """A CA and a server's certificate for loopback: the CA's, the certificate, its key."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    ca, certificate, key = folder / "ca.pem", folder / "server.pem", folder / "server.key"
    authority.cert_pem.write_to_path(ca)
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(certificate, append=number > 0)
    issued.private_key_pem.write_to_path(key)
    return ca, certificate, key


def die_with_parent() -> None:
    """In a process about to start: end it when the tests end, however they do."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextmanager
def moto_server(folder: Path) -> Iterator[S3Server]:
    """An empty moto, ended with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    ca, certificate, key = make_certificate(folder)
    log = folder / "moto.log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    command += ["--ssl-cert", str(certificate), "--ssl-key", str(key)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=folder,
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
    try:
        port = _port_in(log, process)
        yield S3Server(f"https://127.0.0.1:{port}", ca, certificate, key, "AKIAMOTO", "moto-secret")
    finally:
        process.kill()
        process.wait()


def _port_in(log: Path, process: subprocess.Popen[bytes]) -> int:
    give_up = time.monotonic() + STARTING_SECONDS
    while True:
        if found := re.search(r"Running on https://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found[1])
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < give_up, log.read_text()
        time.sleep(0.02)


def swift_python() -> Path:
    """The Python of an environment that has Swift (`make .venv-swift`), or a skip that says so."""
    default = Path(__file__).parents[2] / ".venv-swift/bin/python"
    python = Path(os.environ.get("ART_SWIFT_PYTHON", default))
    if not python.exists():
        pytest.skip(f"no OpenStack Swift: {python} is not there (make .venv-swift)")
    return python


SWIFT_SERVER = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/disks
mount_check = false
fallocate_reserve = 0
log_address = /nonexistent
log_level = WARNING
{tls}
"""
SWIFT_STORAGE = """[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
recon_cache_path = {folder}
allowed_headers = X-Static-Large-Object, Content-Encoding, Content-Disposition
"""
SWIFT_PROXY = """[pipeline:main]
pipeline = catch_errors gatekeeper cache listing_formats bulk s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:tempauth]
use = egg:swift#tempauth
user_swift_user = swift-secret .admin
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:slo]
use = egg:swift#slo
""" + "".join(
    f"[filter:{name}]\nuse = egg:swift#{name}\n"
    for name in ("catch_errors", "gatekeeper", "listing_formats", "bulk")
)
SWIFT_RINGS = """
import sys
from swift.common.ring import RingBuilder
folder, *kinds = sys.argv[1:]
for kind, port in zip(kinds[::2], kinds[1::2]):
    builder = RingBuilder(1, 1, 1)
    here = {"ip": "127.0.0.1", "port": int(port), "device": "disk"}
    builder.add_dev({"id": 0, "region": 1, "zone": 1, "weight": 1, **here})
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{kind}.ring.gz")
"""


@contextmanager
def swift_server(folder: Path) -> Iterator[S3Server]:
    """An OpenStack Swift of one node, its data in `folder`, ended with the block."""
    python = swift_python()
    (folder / "disks/disk").mkdir(parents=True)
    ca, certificate, key = make_certificate(folder)
    ports = dict(zip(("account", "container", "object", "proxy"), free_ports(4), strict=True))
    (folder / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_suffix = tests\n"
        "[storage-policy:0]\nname = disk\ndefault = yes\n"
    )
    for kind, port in ports.items():
        tls = f"cert_file = {certificate}\nkey_file = {key}" if kind == "proxy" else ""
        pipeline = SWIFT_PROXY if kind == "proxy" else SWIFT_STORAGE
        settings = {"kind": kind, "port": port, "folder": folder, "user": getuser(), "tls": tls}
        text = SWIFT_SERVER.format(**settings)
        text += pipeline if kind == "proxy" else pipeline.format(**settings)
        (folder / f"{kind}.conf").write_text(text)
    rings = [
        str(part) for kind in ("account", "container", "object") for part in (kind, ports[kind])
    ]
    subprocess.run([python, "-W", "ignore", "-c", SWIFT_RINGS, folder, *rings], check=True)
    processes = []
    try:
        for kind in ports:
            with (folder / f"{kind}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [
                            python,
                            "-W",
                            "ignore",
                            python.with_name(f"swift-{kind}-server"),
                            folder / f"{kind}.conf",
                        ],
                        stdout=log,
                        stderr=log,
                        preexec_fn=die_with_parent,  # noqa: PLW1509
                    )
                )
        for kind, port in ports.items():
            _wait_for_port(port, processes, folder / f"{kind}.log")
        url = f"https://127.0.0.1:{ports['proxy']}"
        yield S3Server(url, ca, certificate, key, "swift:user", "swift-secret")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_for_port(port: int, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    give_up = time.monotonic() + STARTING_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert all(process.poll() is None for process in processes), log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.02)
