"""Offloaded modules: streaming of layers, host memory, row lookup, idle hooks, PEFT on offloaded layers."""
