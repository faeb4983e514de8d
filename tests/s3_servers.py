"""Real S3 servers as processes of their own, over https on loopback.

moto keeps everything in memory, checks signatures and policies once `check_access` was called, and
takes conditional writes. OpenStack Swift keeps everything on disk, and lets several of the writers
that race for one key win.
"""

from __future__ import annotations

import ctypes
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

import boto3
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
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def session(self, access_key: str = "", secret_key: str = "") -> boto3.Session:
        return boto3.Session(
            access_key or self.access_key, secret_key or self.secret_key, region_name=REGION
        )

    def client(self) -> S3Client:
        """A plain client, to look behind the store's back."""
        return self.session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            verify=str(self.ca),
            config=Config(request_checksum_calculation="when_required"),
        )

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
        yield S3Server(f"https://127.0.0.1:{port}", ca, "AKIAMOTO", "moto-secret")
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
