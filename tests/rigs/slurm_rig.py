"""The real SkyPilot with a real Slurm of three nodes, each with a made-up GPU, on this machine.

with SlurmRig(tmp_path) as rig:
    subprocess.run([rig.python, "-m", "sky.cli", "status"], env=os.environ | rig.environment)
"""

from __future__ import annotations

import csv
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

import pytest

from .namespaces import SBIN, Rig, free_ports, missing, write
from .sshd import SSHD, make_key
from .uv_settings import uv_settings
from .waiting import wait_until

ROOT = Path(__file__).parents[2]
PYTHON = Path(
    os.environ.get("ART_TEST_SKYPILOT_PYTHON", ROOT / ".venv-skypilot" / "bin" / "python")
)
TOOLS = ("slurmctld", "slurmd", "sbatch", "rsync", "nc", "unshare", "setpriv")
NODES = ("n1", "n2", "n3")

needs_slurm = pytest.mark.skipif(
    bool(missing(*TOOLS)) or SSHD is None or os.geteuid() != 0 or not PYTHON.exists(),
    reason="SkyPilot on Slurm takes root, make .venv-skypilot, and slurmctld slurmd slurm-client "
    "rsync netcat-openbsd openssh-server",
)


class SlurmRig(Rig):
    """A Slurm cluster `artci` that SkyPilot knows, while the `with` block runs."""

    cluster = "artci"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, PYTHON)
        self.nodes = folder / "nodes"
        """Home of the user on the nodes."""
        for name in ("home/.slurm", "home/.ssh", "nodes/.ssh", "bin", "spool", "run", "log"):
            (folder / name).mkdir(parents=True, mode=0o700)
        self._controller, self._login, *self._nodes = free_ports(2 + len(NODES))

    def __enter__(self) -> SlurmRig:
        self._write()
        self._start({**os.environ, **self.environment, "PATH": SBIN}, "ready")
        return self

    def jobs(self, cluster: str = "") -> list[str]:
        """The ids of Slurm's jobs, each of them the machines of a cluster."""
        lines = self._slurm("squeue", "--noheader", "--format=%A %j").splitlines()
        jobs = dict(line.split() for line in lines)
        return [job for job, name in jobs.items() if name.startswith(f"art-cloud-{cluster}")]

    def preempt(self, jobs: list[str]) -> None:
        """Their machines are taken away."""
        if jobs:
            self._slurm("scancel", *jobs)
        wait_until(lambda: not set(jobs) & set(self.jobs()))

    def _slurm(self, *command: str) -> str:
        environment = {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf"}
        return subprocess.check_output(command, env=environment, text=True)

    def programs_with(self, secret: str) -> list[str]:
        """Those of the nodes and of SkyPilot that have it in their arguments."""
        found = self._running(lambda arguments: secret in " ".join(arguments))
        return [str(process.cmdline()) for process in found]

    def files_with(self, secret: str) -> list[Path]:
        """Those of the nodes, of SkyPilot and of its user that have it in them."""
        found = []
        for path in (*self.folder.rglob("*"), *Path("/tmp").glob("sky*")):
            with suppress(FileNotFoundError):
                if path.is_file() and secret.encode() in path.read_bytes():
                    found.append(path)
        return found

    def _write(self) -> None:
        sky = PYTHON.parent / "sky"
        host, at = socket.gethostname(), self.folder
        nodes = [
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port}"
            for name, port in zip(NODES, self._nodes, strict=True)
        ]
        make_key(at / "host_key")
        make_key(self.home / ".ssh" / "slurm")
        shutil.copy(self.home / ".ssh" / "slurm.pub", self.nodes / ".ssh" / "authorized_keys")
        write(
            at / "slurm.conf",
            f"""
            ClusterName={self.cluster}
            SlurmctldHost={host}(127.0.0.1)
            SlurmctldPort={self._controller}
            SlurmUser=root
            SlurmdUser=root
            AuthType=auth/none
            CredType=cred/none
            StateSaveLocation={at}/spool/controller
            SlurmdSpoolDir={at}/spool/%n
            SlurmctldPidFile={at}/run/slurmctld.pid
            SlurmdPidFile={at}/run/slurmd-%n.pid
            SlurmctldLogFile={at}/log/slurmctld.log
            SlurmdLogFile={at}/log/slurmd-%n.log
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            MpiDefault=none
            SwitchType=switch/none
            JobAcctGatherType=jobacct_gather/none
            AccountingStorageType=accounting_storage/none
            SelectType=select/cons_tres
            SelectTypeParameters=CR_CPU_Memory
            SchedulerType=sched/backfill
            SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
            ReturnToService=2
            KillWait=5
            MinJobAge=30
            InactiveLimit=0
            SlurmdParameters=config_overrides
            CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
            GresTypes=gpu
            NodeName=DEFAULT CPUs=8 RealMemory=64000 Gres=gpu:H100:1 State=UNKNOWN
            {(chr(10) + 12 * " ").join(nodes)}
            PartitionName=gpu Nodes=ALL Default=YES DefaultTime=01:00:00 MaxTime=02:00:00 State=UP
            """,
        )
        write(at / "gres.conf", "Name=gpu Type=H100 File=/dev/null\n")
        write(
            at / "sshd_config",
            f"""
            ListenAddress 127.0.0.1:{self._login}
            HostKey {at}/host_key
            PidFile {at}/run/sshd.pid
            AuthorizedKeysFile .ssh/authorized_keys
            PermitRootLogin prohibit-password
            PasswordAuthentication no
            KbdInteractiveAuthentication no
            UsePAM no
            StrictModes no
            MaxSessions 200
            MaxStartups 150:30:200
            Subsystem sftp internal-sftp
            SetEnv {" ".join(f"{key}={value}" for key, value in self._node_environment().items())}
            """,
        )
        write(
            self.home / ".slurm" / "config",
            f"""
            Host {self.cluster}
              HostName 127.0.0.1
              Port {self._login}
              User skynode
              IdentityFile {self.home}/.ssh/slurm
              IdentitiesOnly yes
            """,
        )
        self._write_catalog()
        self._write_tools()
        self._write_user()
        write(at / "hosts", f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
        users = Path("/etc/passwd").read_text()
        write(at / "passwd", f"skynode:x:0:0::{self.nodes}:/bin/bash\n{users}")
        write(at / "shadow", "skynode:*:19000:0:99999:7:::\n" + Path("/etc/shadow").read_text())
        exports = [f"export {key}={value}\n" for key, value in self._node_environment().items()]
        write(at / "profile", "".join(exports))
        write(
            at / "init.sh",
            f"""
            set -eu
            for file in hosts passwd shadow profile; do mount --bind {at}/$file /etc/$file; done
            export SLURM_CONF={at}/slurm.conf
            mkdir -p /run/sshd
            slurmctld -c
            for node in {" ".join(NODES)}; do slurmd -N $node; done
            {SSHD} -f {at}/sshd_config -E {at}/log/sshd.log
            until [ "$(sinfo --noheader -t idle --format=%D)" = {len(NODES)} ]; do sleep 0.1; done
            env -u SLURM_CONF {sky} api start --foreground --host 127.0.0.1 &
            until nc -z 127.0.0.1 {self.port}; do sleep 0.1; done
            touch {at}/ready
            while true; do wait; sleep 1; done
            """,
        )

    def _node_environment(self) -> dict[str, str]:
        return {
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            "PATH": f"{self.folder}/bin:{SBIN}",
            **uv_settings(),
        }

    def _write_catalog(self) -> None:
        """SkyPilot's list of GPUs, which is not part of its package."""
        common = self.home / ".sky" / "catalogs" / "v8" / "common"
        common.mkdir(parents=True)
        for name, rows in {
            "accelerators": [["AcceleratorName", "Clouds"], ["H100", "['Slurm']"]],
            "metadata": [["GPU", "MemoryGB", "Manufacturer"], ["H100", "80", "Nvidia"]],
        }.items():
            with (common / f"{name}.csv").open("w", newline="") as file:
                csv.writer(file).writerows(rows)

    def _write_tools(self) -> None:
        """What SkyPilot would download to a node: uv, which there takes the Python that is here,
        and the packages that SkyPilot needs."""
        uv = Path(sysconfig.get_path("scripts")) / "uv"
        [has] = PYTHON.parents[1].glob("lib/python*/site-packages")
        packages = has.relative_to(PYTHON.parents[1])
        write(
            self.folder / "bin" / "uv",
            f"""
            #!/bin/bash
            arguments=("$@")
            theirs=
            for i in "${{!arguments[@]}}"; do
              [ "${{arguments[$i]}}" != 3.10 ] || {{ arguments[$i]={sys.executable}; theirs=1; }}
            done
            case "$*" in "pip uninstall skypilot"*|*/skypilot-*.whl*) exit;; esac
            [ "$1$theirs" = venv1 ] || exec {uv} "${{arguments[@]}}"
            {uv} "${{arguments[@]}}"
            for folder in "${{arguments[@]}}"; do
              [ ! -e "$folder/pyvenv.cfg" ] || echo {has} > "$folder/{packages}/here.pth"
            done
            """,
        )
        write(
            self.folder / "bin" / "curl",
            f"""
            #!/bin/bash
            echo 'mkdir -p "$UV_INSTALL_DIR" && ln -sf {self.folder}/bin/uv "$UV_INSTALL_DIR/uv"'
            """,
        )
        write(
            self.folder / "bin" / "sleep",
            """
            #!/bin/sh
            [ "$1" != 5 ] || set -- 0.1  # between looks at whether there is something to start
            exec /bin/sleep "$@"
            """,
        )
        for tool in ("uv", "curl", "sleep"):
            (self.folder / "bin" / tool).chmod(0o755)
