"""Our tunnel against `ssh -N -L`: new connections, 64 streams, bytes, a login that is killed.

Each is a process of its own and leads, through one sshd on loopback, to one server. The same client
asks them in turn; a figure is the median of its rounds. `ours` and `peer` are ms for a new
connection and the first byte of its answer; `ratio` is the smallest of the four ratios. A stream is
of 25 parts that are sent 50 ms apart: 1.25 s is what all 64 take at best. `direct` is without a
tunnel. `back_s` is the time from the death of the sshd's session to the answer of a call that is
made right then, the longest of all rounds; `ssh -N -L` exits when that happens to it. `load` is the
machine's at the end: 1 is one busy core.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from harness import report

from art_cloud.links.endpoint import SSHRoute
from art_cloud.links.tunnel import open_tunnel

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.rigs.sshd import Sshd
from tests.rigs.waiting import wait_until

NEW_CONNECTIONS, STREAMS, PARTS, PART_SECONDS = 200, 64, 25, 0.05
MEGABYTES, ROUNDS, KILLS, CALLS = 256, 5, 10, 20
CHUNK = bytes(1 << 20)
ECHO, PARTS_PLEASE, DOWN, UP = b"e", b"p", b"d", b"u"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        kind = await reader.read(1)
        if kind == ECHO:
            writer.write(kind)
        elif kind == PARTS_PLEASE:
            for _ in range(PARTS):
                writer.write(kind)
                await asyncio.sleep(PART_SECONDS)
        elif kind == DOWN:
            for _ in range(MEGABYTES):
                writer.write(CHUNK)
                await writer.drain()
        elif kind == UP:
            while await reader.read(1 << 20):
                pass
            writer.write(kind)
        await writer.drain()
    except OSError:
        pass  # its tunnel was killed
    finally:
        writer.close()


def serve(ready: Connection) -> None:
    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def lead(ready: Connection, host: str, config: str, port: int) -> None:
    async def main() -> None:
        tunnel = await open_tunnel(SSHRoute(host=host, config=config), port)
        ready.send(tunnel.port)
        await asyncio.Event().wait()

    asyncio.run(main())


def started(target: Callable[..., None], *arguments: object) -> int:
    """The port that a process of its own listens at."""
    here, there = multiprocessing.Pipe()
    multiprocessing.Process(target=target, args=(there, *arguments), daemon=True).start()
    port: int = here.recv()
    return port


def listens(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


async def ask(port: int, kind: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(kind)
    return reader, writer


async def new_connection(port: int) -> float:
    start = time.perf_counter()
    reader, writer = await ask(port, ECHO)
    assert await reader.read(1) == ECHO
    took = time.perf_counter() - start
    writer.close()
    return took


async def streams(port: int) -> float:
    async def stream() -> None:
        reader, writer = await ask(port, PARTS_PLEASE)
        assert await reader.read() == PARTS_PLEASE * PARTS
        writer.close()

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(stream())
    return time.perf_counter() - start


async def down(port: int) -> float:
    start, size = time.perf_counter(), 0
    reader, writer = await ask(port, DOWN)
    while data := await reader.read(1 << 20):
        size += len(data)
    assert size == MEGABYTES << 20
    writer.close()
    return time.perf_counter() - start


async def up(port: int) -> float:
    start = time.perf_counter()
    reader, writer = await ask(port, UP)
    for _ in range(MEGABYTES):
        writer.write(CHUNK)
        await writer.drain()
    writer.write_eof()
    assert await reader.read() == UP
    writer.close()
    return time.perf_counter() - start


async def killed(sshd: Sshd, port: int) -> tuple[float, int]:
    """Seconds until calls that are made after a kill are answered, and how many failed."""
    sshd.kill_sessions()
    start = time.perf_counter()
    calls = await asyncio.gather(
        *(new_connection(port) for _ in range(CALLS)), return_exceptions=True
    )
    return time.perf_counter() - start, sum(isinstance(call, BaseException) for call in calls)


async def measure(ports: dict[str, int]) -> dict[tuple[str, str], float]:
    """Median seconds of each task on each side."""
    tasks: dict[str, Callable[[int], Awaitable[float]]] = {
        "connection": new_connection,
        "streams": streams,
        "down": down,
        "up": up,
    }
    times: dict[tuple[str, str], list[float]] = {
        (task, side): [] for task in tasks for side in ports
    }
    for number in range(ROUNDS + 1):
        for task, run in tasks.items():
            for _ in range(NEW_CONNECTIONS if run is new_connection else 1):
                for side, port in ports.items():
                    took = await run(port)
                    if number > 0:  # the first one warms all sides up
                        times[task, side].append(took)
        print(
            {f"{task} {side}": round(took[-1], 4) for (task, side), took in times.items() if took}
        )
    return {key: statistics.median(took) for key, took in times.items()}


def main() -> None:
    server = started(serve)
    with tempfile.TemporaryDirectory() as scratch, Sshd(Path(scratch)) as sshd:
        free = sshd._free_port()
        forward = f"127.0.0.1:{free}:127.0.0.1:{server}"
        ssh = subprocess.Popen(["ssh", "-F", sshd.config, "-N", "-L", forward, sshd.host])
        ours = started(lead, sshd.host, str(sshd.config), server)
        wait_until(lambda: listens(free))
        median = asyncio.run(measure({"ours": ours, "peer": free, "direct": server}))
        kills = [asyncio.run(killed(sshd, ours)) for _ in range(KILLS)]
        assert ssh.wait(10) != 0
    ratios = {
        task: median[task, "peer"] / median[task, "ours"] for task, side in median if side == "ours"
    }
    report(
        "tunnel",
        round(median["connection", "ours"] * 1000, 2),
        round(median["connection", "peer"] * 1000, 2),
        "ssh -N -L",
        min(ratios.values()),
        "ms",
        **{f"{task}_ratio": round(ratio, 2) for task, ratio in ratios.items()},
        **{
            f"streams_{side}_s": round(median["streams", side], 3)
            for side in ("ours", "peer", "direct")
        },
        **{
            f"{way}_{side}_mb_per_s": round(MEGABYTES * 1.048576 / median[way, side])
            for way in ("down", "up")
            for side in ("ours", "peer", "direct")
        },
        direct_ms=round(median["connection", "direct"] * 1000, 2),
        back_s=round(max(seconds for seconds, _ in kills), 2),
        kills=KILLS,
        calls=KILLS * CALLS,
        failed_calls=sum(failed for _, failed in kills),
        load=round(os.getloadavg()[0], 1),
    )


if __name__ == "__main__":
    main()
