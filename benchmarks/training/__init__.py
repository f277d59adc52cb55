"""QLoRA steps, under Trainer and TRL as well; the loss in chunks; attention of queries that see no key."""
