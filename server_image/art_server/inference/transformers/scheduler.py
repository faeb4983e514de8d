"""The thread that owns the model: it keeps a batch running that rows join and leave.

Continuous batching: the iteration-level scheduling of Orca (Yu et al., OSDI 2022), with a padded
cache.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from transformers import DynamicCache

from art_cloud.shared.errors import ArtCloudError, ServerError, ServerStoppingError

from ..adapters import AdapterModel
from ..engine import EngineStats, not_loaded
from .detokenize import Decode, TextStream
from .generation import Event, FinishReason, Generation, Piece, Row, Token
from .kv_batch import KVBatch
from .sampling import Drawn, Sampler

PREFILL_TOKENS = 8192
logger = logging.getLogger(__name__)


class Scheduler(threading.Thread):
    """Runs the batch in a thread. Commands come in through `call` and `submit`; pieces go out once
    a step, all together."""

    def __init__(
        self,
        model: AdapterModel,
        decode: Decode,
        end_ids: frozenset[int],
        loop: asyncio.AbstractEventLoop,
        *,
        max_rows: int,
        max_cache_tokens: int,
    ) -> None:
        super().__init__(name="inference", daemon=True)
        self._model = model
        self._decode = decode
        self._end_ids = end_ids
        self._loop = loop
        self._max_rows = max_rows
        self._max_cache_tokens = max_cache_tokens
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self.ended: ArtCloudError | None = None
        """The error that ended the thread; None while it runs."""
        self._ended_lock = threading.Lock()
        self._waiting: deque[Generation] = deque()
        self._rows: list[Row] = []
        self._kv = KVBatch(model.device)
        self._sampler: Sampler | None = None
        self._retired: set[str] = set()
        self._outbox: list[tuple[Generation, Event]] = []
        self._tokens_generated = 0
        self._commands_done = 0
        self._reason: str | None = None
        self._stats = EngineStats()

    # called from other threads

    def submit(self, generations: Sequence[Generation]) -> None:
        self._command(lambda: self._waiting.extend(generations))

    def cancel(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            generation.cancelled = True
        if self.ended is None:
            self._commands.put(lambda: None)

    def call(self, do: Callable[[], None]) -> Future[None]:
        """Run `do` between two steps."""
        future: Future[None] = Future()

        def command() -> None:
            try:
                do()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._command(command)
        return future

    def retire(self, policy: str) -> None:
        """Free `policy` once nothing uses it. A command: run it with `call`."""
        self._retired.add(policy)

    def load(self, policy: str, folder: Path) -> None:
        """Load an adapter as a policy. A command: run it with `call`."""
        self._free_retired()
        self._model.load(policy, folder)
        self._retired.discard(policy)

    def stop(self) -> None:
        self._stopping = True
        self._commands.put(lambda: None)

    def check(self) -> None:
        """Raise the error that ended the thread, if it has ended."""
        if self.ended is not None:
            raise self.ended.with_traceback(None)

    def stats(self) -> EngineStats:
        """The engine's counts, as of the beginning or the end of the newest step."""
        return self._stats

    def _command(self, command: Callable[[], None]) -> None:
        with self._ended_lock:
            self.check()
            self._commands.put(command)

    # the thread

    def run(self) -> None:
        error: ArtCloudError = ServerStoppingError("The inference engine is closed.")
        # of this thread only; the gateway and whoever asks it need a core too
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._run_commands(wait=not (self._rows or self._waiting))
                    self._step()
                    self._publish()
                    self._deliver()
        except BaseException as cause:
            logger.exception("the inference thread died")
            error = ServerError(
                f"The inference engine died of {type(cause).__name__}. Restart the server."
            )
        finally:
            self._end(error)

    def _run_commands(self, *, wait: bool) -> None:
        try:
            while True:
                self._commands.get(block=wait)()
                self._commands_done += 1
                wait = False
        except queue.Empty:
            pass

    def _end(self, error: ArtCloudError) -> None:
        with self._ended_lock:
            self.ended = error
        self._run_commands(wait=False)
        self._fail({row.generation for row in self._rows} | set(self._waiting), error)
        self._rows, self._reason = [], None
        self._waiting.clear()
        self._kv.clear()
        self._publish()
        self._deliver()

    def _step(self) -> None:
        self._drop(lambda row: row.generation.cancelled)
        if any(g.cancelled for g in self._waiting):
            self._waiting = deque(g for g in self._waiting if not g.cancelled)
        joining = self._admit()
        self._publish(joining)  # what runs is known though a step takes long, or hangs
        if joining:
            try:
                self._prefill(joining)
            except Exception as cause:
                self._fail(set(joining), _failed("prefill", cause))
        if self._rows:
            try:
                self._decode_step()
            except Exception as cause:
                self._fail({row.generation for row in self._rows}, _failed("decoding", cause))
                self._rows, self._sampler = [], None
                self._kv.clear()
        self._free_retired()

    def _admit(self) -> list[Generation]:
        """Let waiting generations join the batch, first come first served, as far as rows, cache
        and one prefill allow.

        Reckons with the columns that the batch may grow to, so nobody has to leave.
        """
        rows = len(self._rows)
        columns = max((row.generation.final_length for row in self._rows), default=0)
        joining: list[Generation] = []
        prompts: set[tuple[str | None, tuple[int, ...]]] = set()
        longest = 0
        self._reason = None
        while self._waiting:
            generation = self._waiting[0]
            if generation.policy is not None and generation.policy not in self._model:
                self._fail({self._waiting.popleft()}, not_loaded(generation.policy))
                continue
            rows += generation.choices
            columns = max(columns, generation.final_length)
            longest = max(longest, len(generation.prompt_ids))
            prompts.add((generation.policy, tuple(generation.prompt_ids)))
            if rows > self._max_rows:
                self._reason = f"{self._max_rows} choices run already, as many as may at once"
            elif rows * columns > self._max_cache_tokens and rows > generation.choices:
                self._reason = f"the cache of {self._max_cache_tokens} tokens is spoken for"
            elif len(prompts) * longest > PREFILL_TOKENS and len(prompts) > 1:
                self._reason = "other prompts are being read"
            if self._reason is not None:
                break
            joining.append(self._waiting.popleft())
        return joining

    def _prefill(self, joining: list[Generation]) -> None:
        """Read each distinct prompt once, and let the choices join after their first token."""
        numbers: dict[tuple[str | None, tuple[int, ...]], int] = {}
        rows: list[Row] = []
        prompt_of_row: list[int] = []
        for generation in joining:
            key = (generation.policy, tuple(generation.prompt_ids))
            number = numbers.setdefault(key, len(numbers))
            for choice in range(generation.choices):
                rows.append(
                    Row(generation, choice, TextStream(self._decode, generation.params.stop))
                )
                prompt_of_row.append(number)
        prompts = [ids for _, ids in numbers]
        width = max(map(len, prompts))
        padding = [width - len(ids) for ids in prompts]
        device = self._model.device
        ids_PT = torch.tensor(
            [[0] * empty + list(ids) for empty, ids in zip(padding, prompts, strict=True)],
            device=device,
        )
        padding_P = torch.tensor(padding, device=device)
        columns_T = torch.arange(width, device=device)
        cache = DynamicCache()
        logits_PV = self._model.forward(
            [policy for policy, _ in numbers],
            ids_PT,
            attention_mask=columns_T >= padding_P[:, None] if any(padding) else None,
            position_ids=(columns_T - padding_P[:, None]).clamp_(min=0),
            past_key_values=cache,
        )
        prompt_B = torch.tensor(prompt_of_row, device=device)
        drawn = _sampler(rows, device).draw(logits_PV[prompt_B])
        staying = self._take(rows, drawn)
        if staying:
            prompt_B = prompt_B[torch.tensor(staying, device=device)]
            self._kv.join(cache, padding_P[prompt_B], prompt_B)
            self._rows += [rows[i] for i in staying]
            self._sampler = None

    def _decode_step(self) -> None:
        device = self._model.device
        if self._sampler is None:
            self._sampler = _sampler(self._rows, device)
        last_ids_B1 = torch.tensor([[row.ids[-1]] for row in self._rows], device=device)
        policies = [row.generation.policy for row in self._rows]
        logits_BV = self._model.forward(policies, last_ids_B1, **self._kv.step_inputs())
        staying = self._take(self._rows, self._sampler.draw(logits_BV))
        self._keep(staying)

    def _take(self, rows: list[Row], drawn: Drawn) -> list[int]:
        """Give every row its token; return the positions of the rows that go on."""
        self._tokens_generated += len(rows)
        staying: list[int] = []
        for i, (row, token, logprob) in enumerate(
            zip(rows, drawn.ids, drawn.logprobs, strict=True)
        ):
            params = row.generation.params
            row.ids.append(token)
            row.logprobs.append(logprob)
            if params.top_logprobs is not None:
                assert drawn.top is not None
                top = drawn.top[i][: params.top_logprobs]
                row.tokens.append(Token(token, logprob, top))
            reason = self._read(row, token)
            if reason is None:
                staying.append(i)
        return staying

    def _read(self, row: Row, token: int) -> FinishReason | None:
        """Turn the row's newest token into text where somebody needs it now; why the row ends."""
        generation = row.generation
        params = generation.params
        ended = token in self._end_ids and not params.ignore_eos
        text = ""
        if (generation.streamed or params.stop) and not ended:
            text = row.text.push(token)
        reason: FinishReason | None = None
        if ended or row.text.stopped:
            reason = "stop"
        elif len(row.ids) >= params.max_tokens:
            reason = "length"
        if reason is not None:
            if not (generation.streamed or params.stop):
                text = row.text.push(*(row.ids[:-1] if ended else row.ids))
            text += row.text.finish()
        if generation.streamed:
            if text or reason is not None:
                self._tell(row, text, reason)
        else:
            row.parts.append(text)
            if reason is not None:
                self._tell(row, "".join(row.parts), reason)
        return reason

    def _tell(self, row: Row, text: str, reason: FinishReason | None) -> None:
        self._outbox.append((row.generation, Piece(row, text, row.tokens, reason)))
        row.tokens = []

    def _drop(self, gone: Callable[[Row], bool]) -> None:
        self._keep([i for i, row in enumerate(self._rows) if not gone(row)])

    def _keep(self, staying: list[int]) -> None:
        if len(staying) == len(self._rows):
            return
        self._kv.keep(staying)
        self._rows = [self._rows[i] for i in staying]
        self._sampler = None

    def _free_retired(self) -> None:
        if not self._retired:
            return
        used = {row.generation.policy for row in self._rows} | {g.policy for g in self._waiting}
        for policy in self._retired - used:
            self._model.unload(policy)
            self._retired.discard(policy)

    def _fail(self, generations: set[Generation], error: ArtCloudError) -> None:
        self._outbox += [(generation, error) for generation in generations]

    def _publish(self, joining: Sequence[Generation] = ()) -> None:
        running = len(self._rows) + sum(generation.choices for generation in joining)
        waiting = sum(generation.choices for generation in self._waiting)
        tokens = self._tokens_generated
        moved = tokens + self._commands_done
        self._stats = EngineStats(running, waiting, tokens, self._reason, moved)

    def _deliver(self) -> None:
        if not self._outbox:
            return
        events, self._outbox = self._outbox, []
        try:
            self._loop.call_soon_threadsafe(_hand_out, events)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._stopping = True


def _sampler(rows: Sequence[Row], device: torch.device) -> Sampler:
    return Sampler(
        [row.generation.params for row in rows],
        [row.choice for row in rows],
        [len(row.ids) for row in rows],
        device,
    )


def _failed(stage: str, cause: Exception) -> ServerError:
    logger.error("%s failed", stage, exc_info=cause)
    return ServerError(
        f"The inference engine failed in {stage}: {type(cause).__name__}: {cause}. The engine goes "
        "on; ask again, with a shorter prompt or fewer choices if memory ran out."
    )


def _hand_out(events: list[tuple[Generation, Event]]) -> None:
    for generation, event in events:
        if not generation.cancelled:
            generation.events.put_nowait(event)
