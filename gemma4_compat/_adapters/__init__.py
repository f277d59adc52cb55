"""PEFT adapters: the keys of their weights, their configurations, failed loads."""
