"""Patches for 4-bit and 8-bit weights."""
