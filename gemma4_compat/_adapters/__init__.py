"""PEFT adapters: the keys of their weights, their configurations, and recovery from failed loads."""
