"""Bytes of what is quantized."""
