"""Where metrics and rollouts are shown beside the store: W&B and Langfuse."""
