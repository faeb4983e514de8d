#!/usr/bin/env python3
"""Calls to SkyPilot, in a Python that has it: art-cloud itself does without its dependencies.

    echo '{"call": "list"}' | python bridge.py

The request is a JSON object on standard input, so that secrets stand neither in arguments nor on
disk: `call` names a function below, the rest are its arguments. Each line of standard output is a
JSON object: {"log": ...} while it goes on, and at the end {"result":
...}, or {"error": ..., "message": ...} with the name of SkyPilot's exception.

To import SkyPilot takes seconds, so art-cloud does it once: standard input of `bridge.py serve` is
a socket that hands over other sockets. On each a request comes and is answered, by a process that
ends when the other side closes it. All of them end with the program that started this one.
"""

from __future__ import annotations

import difflib
import importlib
import io
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import sky
import yaml
from sky import exceptions
from sky.client import sdk
from sky.client.cli import command
from sky.utils import cluster_utils

PREFIX = "art-cloud-"
"""Of the names of our clusters at SkyPilot."""
LAUNCHING = ("PENDING", "RUNNING")
STATES = {
    sky.ClusterStatus.UP: "running",
    sky.ClusterStatus.AUTOSTOPPING: "ending",
    sky.ClusterStatus.STOPPED: "stopped",
}
"""Of clusters; those of others are "starting"."""
POLL_SECONDS = 1.0
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WARNING = re.compile(r"W [-\d]+ [:.\d]+ PID=\d+ \S+\] ")
JOB = re.compile(r"^\((setup|art-server|head)\b[^)]*\) ")
LOG_LINES = 15
SERVER = Path(__file__).parent / "server.yaml"
OWNER = "ART_CLOUD_OWNER"
"""A variable of a task: by whose token it was launched (half its SHA-256)."""
OURS = ("name", "run", "secrets")
"""What of a task is not the user's to say."""


class Lines(io.TextIOBase):
    """Gives what is written to it as lines of the log."""

    def __init__(self) -> None:
        self._rest = ""
        self.warnings: dict[str, None] = {}
        """Those of SkyPilot, in order: why a cloud refused a machine is said nowhere else."""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if said := plain(line.rpartition("\r")[2]).strip():
                answer(log=said)
                if warning := WARNING.match(said):
                    self.warnings[said[warning.end() :]] = None
        return len(text)


def offers(task: dict[str, Any]) -> list[dict[str, Any]]:
    """What SkyPilot could take for the task, with prices in US dollars an hour for all nodes."""
    clouds = check()
    made, dag = make_task(task), sky.Dag()
    dag.add(made)
    feasible = sdk.optimize(dag)
    listed = [(wanted, listing(wanted)) for wanted in made.resources]
    found: list[dict[str, Any]] = []
    reasons: list[ValueError] = []
    try:
        sdk.stream_and_get(feasible, output_stream=Lines())
        for wanted, request in listed:
            try:
                found += offers_of(wanted, request, clouds)
            except ValueError as error:  # a cloud that has none of these
                reasons.append(error)
        if reasons and not found:
            raise reasons[0]
    except (exceptions.ResourcesUnavailableError, ValueError) as error:
        raise type(error)("\n".join([str(error), *unknown_gpus(made, clouds)])) from error
    for offer in found:
        offer["price_per_hour"] *= made.num_nodes
    return sorted(found, key=lambda offer: float(offer["price_per_hour"]))


def unknown_gpus(made: sky.Task, clouds: list[str]) -> Iterator[str]:
    """Says what the catalogs have in place of those that they have not."""
    enabled = [cloud.lower() for cloud in clouds]
    names = sorted(sdk.get(sdk.list_accelerators(require_price=False, clouds=enabled)))
    for gpu in sorted({gpu for wanted in made.resources for gpu in wanted.accelerators or ()}):
        if gpu not in names:
            near = difflib.get_close_matches(gpu, names, n=5, cutoff=0.4)
            yield f"No GPU is called {gpu} there. Near names: {', '.join(near or names)}."


def listing(wanted: sky.Resources) -> Any:
    """The request for what SkyPilot's catalog has of it; None if it is no GPU."""
    if not wanted.accelerators:
        return None
    [(gpu, count)] = wanted.accelerators.items()
    return sdk.list_accelerators(
        name_filter=f"^{re.escape(gpu)}$",
        quantity_filter=int(count),
        region_filter=None if str(wanted.cloud) == "Slurm" else wanted.region,
        clouds=str(wanted.cloud).lower() if wanted.cloud else None,
        require_price=False,
        case_sensitive=False,
    )


def offers_of(wanted: sky.Resources, request: Any, clouds: list[str]) -> Iterator[dict[str, Any]]:
    if request is None:
        cloud = str(wanted.cloud or "any").lower()
        yield offer_of(cloud, wanted.region, str(wanted), wanted.use_spot, math.nan)
        return
    rows = sdk.get(request)
    enabled = {cloud.lower() for cloud in clouds}
    for row in (row for listed in rows.values() for row in listed):
        fits = wanted.instance_type in (None, row.instance_type)
        price = row.spot_price if wanted.use_spot else row.price
        unknown = price is None or math.isnan(price)
        if fits and row.cloud.lower() in enabled and not (wanted.use_spot and unknown):
            machine = f"{row.accelerator_name}:{int(row.accelerator_count)}"
            if row.instance_type:
                machine += f" {row.instance_type}"
            yield offer_of(row.cloud.lower(), wanted.region, machine, wanted.use_spot, price)


def offer_of(
    cloud: str, region: str | None, machine: str, spot: bool, price: float | None
) -> dict[str, Any]:
    known = price is not None and not math.isnan(price)
    return {
        "region": f"{cloud}/{region}" if region else cloud,
        "machine": machine,
        "spot": spot,
        "price_per_hour": price if known else 0.0,
    }


def launch(name: str, task: dict[str, Any]) -> dict[str, Any]:
    """Returns once the machine is there, and its set-up and its server are on their way; a machine
    that is there is left. The result is how to log in, and whether the machine is a `fresh` one."""
    refuse_others(name)
    fresh, pending = False, launching(name)
    if pending:
        sdk.stream_and_get(pending[0], output_stream=Lines())
    if not has_server(name):
        fresh = True
        request = sdk.launch(make_task(task), cluster_name=PREFIX + name)
        said = Lines()
        try:
            sdk.stream_and_get(request, output_stream=said)
        except exceptions.ResourcesUnavailableError as error:
            tried = "\n".join([str(error), *said.warnings])
            raise exceptions.ResourcesUnavailableError(tried) from error
    else:
        refuse_another_owner(name, task["envs"].get(OWNER))
    return {**ssh_of(name), "fresh": fresh}


def refuse_others(name: str) -> None:
    """Where many users share an API server, a name belongs to one of them."""
    mine = {record["name"] for record in sdk.get(sdk.status([PREFIX + name]))}
    for record in sdk.get(sdk.status([PREFIX + name], all_users=True)):
        if record["name"] not in mine:
            whose = record["user_name"] or record["user_hash"]
            raise exceptions.ClusterOwnerIdentityMismatchError(
                f"{record['name']} is {whose}'s. Give yours another name (name=)."
            )


def refuse_another_owner(name: str, owner: str | None) -> None:
    has = owner_of(look(name))
    if owner and has and has != owner:
        raise exceptions.ClusterOwnerIdentityMismatchError(
            f"{PREFIX + name} was started from elsewhere, so the token of its server is not known "
            "here. Give yours another name (name=)."
        )


def owner_of(record: Any) -> str | None:
    """By whose token the cluster was launched; None: that is not known."""
    with suppress(Exception):  # SkyPilot's own copy of the task, in whatever form it keeps that
        task = yaml.safe_load(record["last_creation_yaml"])
        return str(task["envs"][OWNER])
    return None


def follow(name: str) -> list[str]:
    """Returns once the server of the cluster has ended: the last lines of what it wrote."""
    return list(deque(lines_of_job(name, follow=True), LOG_LINES))


def has_server(name: str) -> bool:
    """Whether the cluster has one, or is about to. One that had one is ended."""
    record = look(name)
    if record is None or not is_up(record):
        return False
    jobs = list(filter(None, sdk.get(sdk.job_status(PREFIX + name)).values()))
    if not all(status.is_terminal() for status in jobs):
        return True
    if jobs:  # autostop will take the machine down
        terminate(name)
    return False


def ssh_of(name: str) -> dict[str, str]:
    """How to log in to the cluster's first machine."""
    if not command._get_cluster_records_and_set_ssh_config([PREFIX + name]):
        raise gone(name)
    config = Path("~/.sky/generated/ssh").expanduser() / (PREFIX + name)
    text = re.sub(r"(?m)^(\s*IdentityFile )~", rf"\1{Path.home()}", config.read_text())
    return {"host": PREFIX + name, "config": text}


def list_(name: str | None = None) -> list[dict[str, Any]]:
    """Our clusters, as their clouds tell, not as SkyPilot remembers; but for one that SkyPilot has
    been at work on for 20 s (sky/backends/backend_utils.py, refresh_cluster_record)."""
    names = [PREFIX + name] if name else None
    records = sdk.get(sdk.status(names, refresh=sky.StatusRefreshMode.FORCE))
    return [described(one) for one in records if one["name"].startswith(PREFIX)]


def described(record: Any) -> dict[str, Any]:
    where = "/".join(filter(None, (record["cloud"], record["region"]))).lower()
    handle = record["handle"]
    info = handle.cached_cluster_info
    machine = info.head_instance_id if info else None
    addresses = [pair[0] for pair in (handle.stable_internal_external_ips or []) if pair]
    nodes = f"{len(addresses)} nodes: {' '.join(addresses)}" if len(addresses) > 1 else None
    detail = ", ".join(filter(None, (where, machine, nodes, f"sky status {record['name']}")))
    return {
        "name": record["name"].removeprefix(PREFIX),
        "state": STATES.get(record["status"], "starting"),
        "started_at": record["launched_at"],
        "detail": detail,
        "identity": identity_of(record),
        "owner": owner_of(record),
    }


def identity_of(record: Any) -> str:
    return f"{record['cluster_hash']}/{record['launched_at']}"


def terminate(name: str, only: str | None = None) -> None:
    """Cancels a launch that is on its way, and ends the machine; returns when it is gone. With
    `only` nothing happens but to the cluster of that identity.

    What its server wrote is answered first, since it goes with the machine.
    """
    if only is not None and not is_that(name, only):
        return
    for request in launching(name):
        sdk.get(sdk.api_cancel(request))
    with suppress(Exception):  # there is no machine, or none that answers
        logs(name, follow=False)
    while True:
        try:
            sdk.stream_and_get(sdk.down(PREFIX + name), output_stream=io.StringIO())
        except exceptions.ClusterDoesNotExist:
            return
        if look(name) is None or (only is not None and not is_that(name, only)):
            return
        time.sleep(POLL_SECONDS)


def is_that(name: str, identity: str) -> bool:
    record = look(name)
    return record is not None and identity_of(record) == identity


def logs(name: str, follow: bool) -> None:
    for line in lines_of_job(name, follow=follow):
        answer(log=line)


def gone(name: str) -> exceptions.ClusterDoesNotExist:
    return exceptions.ClusterDoesNotExist(f"{PREFIX + name} is not listed by: sky status")


def lines_of_job(name: str, *, follow: bool) -> Iterator[str]:
    """What the server of the cluster wrote; with `follow` until it ends."""
    if not sdk.get(sdk.status([PREFIX + name])):
        raise gone(name)
    for chunk in sdk.tail_logs(PREFIX + name, None, follow=follow, preload_content=False):
        line = plain(chunk or "").rstrip("\n")
        if JOB.match(line):
            yield JOB.sub("", line)


def check() -> list[str]:
    """The clouds that may be used; those set up since SkyPilot looked last are found."""
    said = io.StringIO()
    clouds = sdk.get(sdk.enabled_clouds())
    if not clouds:
        sdk.stream_and_get(sdk.check(None, verbose=False), output_stream=said)
        clouds = sdk.get(sdk.enabled_clouds())
    if not clouds:
        raise exceptions.NoCloudAccessError(plain(said.getvalue()).strip())
    return [str(cloud) for cloud in clouds]


def look(name: str) -> Any:
    """The record of one of our clusters, asked anew; None if there is none."""
    records = sdk.get(sdk.status([PREFIX + name], refresh=sky.StatusRefreshMode.FORCE))
    return records[0] if records else None


def is_up(record: Any) -> bool:
    return bool(record["status"] == sky.ClusterStatus.UP)


def launching(name: str) -> list[str]:
    """The requests by which the cluster is being launched, whoever asked for it."""
    return [
        request.request_id
        for request in sdk.api_status(cluster_name=PREFIX + name)
        if request.name.endswith("launch") and request.status in LAUNCHING
    ]


def make_task(asked: dict[str, Any]) -> sky.Task:
    """`server.yaml` with what is asked for: `resources`, `num_nodes`, `envs`, `mounts` (of files,
    by their place on the machine), `max_hourly_cost`, and `yaml`, a user's own task."""
    config = yaml.safe_load(SERVER.read_text())
    config["file_mounts"] = asked["mounts"]
    if asked["yaml"]:
        merge(config, read_task(Path(asked["yaml"])))
    if asked["resources"]:
        if not asked["yaml"]:
            del config["resources"]["accelerators"]
        config["resources"] |= asked["resources"]
    if asked["max_hourly_cost"]:
        config["resources"]["max_hourly_cost"] = asked["max_hourly_cost"]
    config["num_nodes"] = asked["num_nodes"] or config.get("num_nodes", 1)
    config["envs"] |= asked["envs"]
    return sky.Task.from_yaml_config(config)


def read_task(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not the YAML of a SkyPilot task")
    for key in OURS:
        if key in content:
            raise ValueError(f"{path} has `{key}`, which is art-cloud's to say: the server is run")
    return content


def merge(config: dict[str, Any], user: dict[str, Any]) -> None:
    """The user's resources in place of ours, but for autostop; other parts beside ours."""
    autostop = config["resources"]["autostop"]
    setup = "\n".join(filter(None, (user.get("setup"), config["setup"])))
    both = {key: config[key] | user.get(key, {}) for key in ("envs", "file_mounts")}
    config |= user | both | {"setup": setup}
    config["resources"] = {**user.get("resources", {}), "autostop": autostop}


def plain(text: str) -> str:
    return ANSI.sub("", text)


CALLS: dict[str, Callable[..., Any]] = {
    "offers": offers,
    "launch": launch,
    "follow": follow,
    "list": list_,
    "terminate": terminate,
    "logs": logs,
    "check": check,
}
OUT = os.fdopen(os.dup(1), "w")
"""For answers. SkyPilot prints to standard output: its place is standard error."""


def answer(**message: Any) -> None:
    print(json.dumps(message), file=OUT, flush=True)


def handle(request: dict[str, Any]) -> None:
    try:
        answer(result=CALLS[request.pop("call")](**request))
    except Exception as error:
        message = plain(str(error)).strip()
        answer(error=type(error).__name__, message=message or type(error).__name__)


def serve() -> None:
    """Each socket that comes becomes standard input and `OUT` of a process of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    sockets = socket.socket(fileno=0)
    while handed := socket.recv_fds(sockets, 1, 1)[1]:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                for place in (0, OUT.fileno()):
                    os.dup2(handed[0], place)
                os.close(handed[0])
                importlib.reload(cluster_utils)  # a lock that it makes takes no fork
                request = json.loads(sys.stdin.readline())
                threading.Thread(target=end_with_standard_input, daemon=True).start()
                handle(request)
            finally:
                os._exit(0)
        os.close(handed[0])


def end_with_standard_input() -> None:
    """Nobody waits for the answer once the other side has closed it."""
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    os.dup2(2, 1)
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        handle(json.load(sys.stdin))


if __name__ == "__main__":
    main()
