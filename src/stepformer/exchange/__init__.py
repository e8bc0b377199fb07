"""Models of others, and ours for others: Hugging Face, checkpoints."""
