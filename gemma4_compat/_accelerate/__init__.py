"""What accelerate put on a model: its hooks, and its device maps."""
