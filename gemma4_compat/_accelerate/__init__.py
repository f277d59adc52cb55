"""What accelerate put on a model: its hooks, and the device maps it takes."""
