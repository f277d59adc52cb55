"""What `gemma4-compat serve` gives to its clients."""
