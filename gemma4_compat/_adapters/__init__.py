"""PEFT adapters: names of their weights, their configurations, failed loads."""
