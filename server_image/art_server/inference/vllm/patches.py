"""Changes to stock vLLM, made when it starts. vLLM's own Python runs this file, so it imports
nothing of art-cloud.

Each of its processes ends when its parent does, or its standard input, of which the one who started
vLLM holds the other end: nothing is left whatever kills that process, or one of these, or both.
Its logprobs are those of the temperature that was sampled at. What does not fit into the context is
refused. And on a CPU an adapter is multiplied by once for a batch, and the base model stays itself
beside adapters.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from typing import Any


def end_with_parent(socket: str) -> None:
    """Kill this process group, and remove the socket with its folder, once the parent of this
    process is gone, or whoever holds the other end of standard input.

    All processes that vLLM spawns have the same standard input, and import this module: several may
    do this at once, and the first that is through ends the others.
    """
    parent = os.pidfd_open(os.getppid())

    def wait() -> None:
        select.select([0, parent], [], [])
        with suppress(OSError):
            os.unlink(socket)
        with suppress(OSError):
            os.rmdir(os.path.dirname(socket))
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="parent").start()


def temper_logprobs() -> None:
    """Let `raw_logprobs` be of the model's logits divided by the request's temperature (by 1 where
    that is 0), before penalties, biases and any top-p, top-k or min-p cut.

    vLLM has "raw" (temperature 1) and "processed" (after every cut); an importance ratio needs what
    lies between. This is of model runner V1 (vllm/v1/sample/sampler.py).
    """
    from vllm.v1.sample import sampler

    class TemperedSampler(sampler.Sampler):
        _temperature_B: Any = None

        def forward(self, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            self._temperature_B = sampling_metadata.temperature
            try:
                return super().forward(logits, sampling_metadata, *args, **kwargs)
            finally:
                self._temperature_B = None

        def compute_logprobs(self, logits_BV: Any) -> Any:
            if self._temperature_B is None:
                return logits_BV.float().log_softmax(-1)
            temperature_B = self._temperature_B.clone()
            temperature_B[temperature_B == 0] = 1.0
            return (logits_BV.float() / temperature_B[:, None]).log_softmax(-1)

    sampler.Sampler = TemperedSampler


def group_rows() -> None:
    """Make vLLM on a CPU multiply once for each adapter, and leave rows without an adapter alone.
    Without this, it copies an adapter's matrices for each row of a batch, and takes rows without an
    adapter (index -1) for rows of the last slot's (vllm/lora/punica_wrapper/punica_cpu.py)."""
    import torch
    from vllm.lora.punica_wrapper import punica_cpu

    def rows_by_slot(slots_T: Any) -> list[tuple[int, Any]]:
        slots = slots_T.unique().tolist()
        if len(slots) == 1:
            return [(slots[0], slice(None))] if slots[0] >= 0 else []
        return [(slot, (slots_T == slot).nonzero()[:, 0]) for slot in slots if slot >= 0]

    def add(groups: Any, y_TO: Any, x_TI: Any, a: Any, b: Any, scale: float) -> None:
        for slot, rows in groups:
            x = x_TI[rows].float()
            outputs = [
                (scale * (x @ a_RI[slot, 0].float().T)).to(y_TO.dtype) @ b_OR[slot, 0].T
                for a_RI, b_OR in zip(a, b, strict=True)
            ]
            y_TO[rows] += outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    class GroupedPunica(punica_cpu.PunicaWrapperCPU):
        _linear: Any = ()
        _sampled: Any = ()

        def update_metadata(self, *args: Any, **kwargs: Any) -> None:
            super().update_metadata(*args, **kwargs)
            self._linear = rows_by_slot(self.token_lora_indices)
            self._sampled = rows_by_slot(self.sampler_indices)

        def add_lora_linear(
            self, y: Any, x: Any, a: Any, b: Any, scale: float, widths: Any, **kwargs: Any
        ) -> None:
            add(self._linear, y, x, a, b, scale)

        def add_lora_logits(
            self, y: Any, x: Any, a: Any, b: Any, scale: float, **kwargs: Any
        ) -> None:
            vocabulary = min(y.shape[1], b.shape[2])  # each with a padding of its own
            add(self._sampled, y[:, :vocabulary], x, (a,), (b[:, :, :vocabulary],), scale)

    punica_cpu.PunicaWrapperCPU = GroupedPunica


def refuse_too_long() -> None:
    """Have vLLM refuse a prompt that leaves less room than max_tokens asks for, as OpenAI does: it
    would answer with fewer tokens (vllm/entrypoints/serve/utils/api_utils.py)."""
    from vllm.entrypoints.serve.utils import api_utils
    from vllm.exceptions import VLLMValidationError

    get_max_tokens = api_utils.get_max_tokens

    def get_all_max_tokens(
        max_model_len: int, max_tokens: int | None, input_length: int, *args: Any, **kwargs: Any
    ) -> int:
        left: int = get_max_tokens(max_model_len, max_tokens, input_length, *args, **kwargs)
        if max_tokens is not None and max_tokens > left:
            raise VLLMValidationError(
                f"The prompt has {input_length} tokens and max_tokens is {max_tokens}, which "
                f"together exceed the model's context length of {max_model_len}.",
                parameter="input_tokens",
                value=input_length,
            )
        return left

    api_utils.get_max_tokens = get_all_max_tokens


def change() -> None:
    """Apply all changes. It runs in the processes that vLLM spawns too: they import this module,
    but not as main."""
    from vllm.platforms import current_platform

    temper_logprobs()
    if current_platform.is_cpu():
        group_rows()


if __name__ == "__main__" and os.getpgrp() != os.getpid():
    raise SystemExit("vLLM needs a process group of its own: start it with setpgid.")
end_with_parent(sys.argv[sys.argv.index("--uds") + 1])
change()
if __name__ == "__main__":
    refuse_too_long()

    from vllm.entrypoints.launchers.api_server.entry import main

    main()
