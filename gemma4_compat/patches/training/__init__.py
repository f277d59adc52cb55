"""Patches for training."""
