"""Metrics to Weights & Biases, by its own package (extra `wandb`)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..shared.errors import ConfigError
from ..shared.progress import say
from ..shared.protocol import Metrics
from .tracker import CLOSE_SECONDS, Event, Run, numbers

if TYPE_CHECKING:
    import wandb

STEP = "training_step"
"""The x axis. It is not W&B's own step, which only grows: an evaluation may be of an older step."""
ROW = "_step"
"""W&B's own count of rows."""
INIT_SECONDS = 12.0
"""How long connecting may take: less than CLOSE_SECONDS, so that a program can end though W&B does
not answer."""
FLUSH_SECONDS = 0.2
"""How often W&B writes to its file. A program that is killed loses what is not in there."""
WRITE_SECONDS = 10.0


class WandbTracker:
    """One run for a model, over all programs that train it.

    Where it is logged in, and where it keeps its files, W&B finds in its own variables. Beside
    those files it is noted what they have, a line for each row, so that nothing is sent twice and
    nothing is left out, also if the program is killed. W&B counts rows as we do: a run that is
    resumed online says how many it has.
    """

    title = "W&B"

    def __init__(self) -> None:
        self._run: wandb.Run | None = None
        self._sent: dict[int, Metrics] = {}
        """The metrics that W&B has of each step."""
        self._rows = 0
        self._file = self._note = Path()

    def open(self, run: Run) -> None:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError("no API key. Run `wandb login`, or set WANDB_API_KEY")
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            config=run.config,
            resume="allow",
            reinit="create_new",  # beside whatever run the script has of its own
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,  # they would be of this machine, not of the GPU's
                x_transaction_log_flush_interval=FLUSH_SECONDS,
                init_timeout=INIT_SECONDS,
                finish_timeout=CLOSE_SECONDS,
            ),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        settings = self._run.settings
        self._file = Path(settings.sync_file)
        self._note = Path(settings.wandb_dir) / f"art-cloud-{run.id}.jsonl"
        rows = [(row["step"], numbers(row)) for row in run.history]
        self._rows = self._run.starting_step
        if self._run.resumed and not self._note.exists():  # all of it was sent from elsewhere
            self._add([{ROW: -1, STEP: step, **metrics} for step, metrics in rows])
        self._find_sent(None if self._run.offline else self._rows)
        self._log(rows)
        where = f"wandb sync {settings.sync_dir}" if self._run.offline else self._run.url
        say(f"{run.name} on W&B: {where}")

    def send(self, event: Event) -> None:
        self._log([(event.step, event.metrics)])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _find_sent(self, rows: int | None) -> None:
        """Read from the note which rows were sent, and keep the first `rows` of them: W&B has no
        more (None: it has all)."""
        lines = self._note.read_text().splitlines(keepends=True) if self._note.exists() else []
        if lines and not lines[-1].endswith("\n"):  # of a program that was killed
            del lines[-1]
        noted = [json.loads(line) for line in lines]
        noted = [row for row in noted if rows is None or row[ROW] < rows]
        self._note.unlink(missing_ok=True)
        self._add(noted)
        for row in noted:
            self._sent.setdefault(row[STEP], {}).update(row)

    def _add(self, rows: Sequence[dict[str, float]]) -> None:
        with self._note.open("a") as note:
            note.writelines(json.dumps(row) + "\n" for row in rows)

    def _log(self, rows: Sequence[tuple[int, Metrics]]) -> None:
        """Send the metrics of `rows` that W&B lacks (at their step, with their value), and note
        them."""
        assert self._run is not None
        size, last, logged = self._file.stat().st_size, "", []
        for step, metrics in rows:
            sent = self._sent.setdefault(step, {})
            new = {key: value for key, value in metrics.items() if sent.get(key) != value}
            if new:
                self._run.log({STEP: step, **new})
                logged.append({ROW: self._rows, STEP: step, **new})
                self._rows += 1
                sent |= new
                last = max(new)
        if logged and self._is_written(size, last):
            self._add(logged)

    def _is_written(self, size: int, last: str) -> bool:
        """Wait until W&B's file, which had `size` bytes before, has a row with the metric
        `last`."""
        give_up = time.monotonic() + WRITE_SECONDS
        while time.monotonic() < give_up:
            with self._file.open("rb") as file:
                file.seek(size)
                if last.encode() in file.read():
                    return True
            time.sleep(FLUSH_SECONDS / 4)
        return False
