"""Safetensors files tensor by tensor, and checkpoints in several of them."""
