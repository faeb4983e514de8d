"""Stock vLLM, with what it lacks for us. Run by vLLM's own Python: it imports nothing of ours.

Each of its processes ends when its parent does, or its standard input, of which the one who started
vLLM holds the other end: nothing is left whatever kills that process, or one of these, or both.
Its logprobs are those of the temperature that was sampled at. What does not fit into the context is
refused. And on a CPU the base model stays itself beside adapters.
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
    """Kill this process group, and remove the socket, once the parent of this process is gone, or
    whoever holds the other end of standard input.

    All processes that vLLM spawns have the same standard input, and import this module.
    """
    parent = os.pidfd_open(os.getppid())

    def wait() -> None:
        select.select([0, parent], [], [])
        with suppress(OSError):
            os.unlink(socket)
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


def free_base_rows() -> None:
    """On a CPU, vLLM gives rows without an adapter the index -1, and so the adapter of the last
    slot, as soon as there is one (vllm/lora/ops/torch_ops/lora_ops.py): zero what they get."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(
        inputs: Any, weights: Any, outputs_BR: Any, indices_B: Any, scaling: float = 1.0
    ) -> None:
        shrink(inputs, weights, outputs_BR, indices_B, scaling)
        outputs_BR[indices_B < 0] = 0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink


def refuse_too_long() -> None:
    """Refuse a prompt that leaves less room than max_tokens asks for, as OpenAI does: vLLM would
    answer with fewer tokens (vllm/entrypoints/serve/utils/api_utils.py)."""
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
    """Also in the processes that vLLM spawns: they import this module, but not as main."""
    from vllm.platforms import current_platform

    temper_logprobs()
    if current_platform.is_cpu():
        free_base_rows()


if __name__ == "__main__" and os.getpgrp() != os.getpid():
    raise SystemExit("vllm_main needs a process group of its own: start it with setpgid.")
end_with_parent(sys.argv[sys.argv.index("--uds") + 1])
change()
if __name__ == "__main__":
    refuse_too_long()

    from vllm.entrypoints.launchers.api_server.entry import main

    main()
