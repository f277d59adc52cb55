"""Patches for weights on the CPU or on disk."""
