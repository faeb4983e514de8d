"""The server that runs beside the GPU: OpenAI-compatible inference and GRPO training of LoRAs."""
