"""The engine in this process: Hugging Face models, batched continuously."""
