"""Train LLM agents with GRPO on a LoRA, from a laptop."""
