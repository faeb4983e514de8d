"""Stock vLLM, with what it lacks for us. Run by vLLM's own Python: it imports nothing of ours.

It ends when its standard input does: the one who started it holds the other end, so that nothing is
left whatever kills that process. Its logprobs are those of the temperature that was sampled at. And
on a CPU the base model stays itself beside adapters.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any


def end_with_parent(socket: str) -> None:
    """Kill this process group once standard input is at its end, and remove the socket."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        with suppress(OSError):
            os.unlink(socket)
            os.rmdir(os.path.dirname(socket))
        os.killpg(0, signal.SIGKILL)

    if os.getpgrp() != os.getpid():
        raise SystemExit("vllm_main needs a process group of its own: start it with setpgid.")
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


def change() -> None:
    """Also in the processes that vLLM spawns: they import this module, but not as main."""
    from vllm.platforms import current_platform

    temper_logprobs()
    if current_platform.is_cpu():
        free_base_rows()


if __name__ == "__main__":
    end_with_parent(sys.argv[sys.argv.index("--uds") + 1])
change()
if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
