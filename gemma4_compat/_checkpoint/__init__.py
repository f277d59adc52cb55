"""Read and write safetensors files tensor by tensor, and checkpoints in several files."""
