"""QLoRA steps, under Trainer and TRL as well; GRPO; the loss in chunks; attention of queries that see no key."""
