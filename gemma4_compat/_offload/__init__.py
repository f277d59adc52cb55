"""Offloaded modules: streaming of layers, host memory, row lookup, PEFT on offloaded layers."""
