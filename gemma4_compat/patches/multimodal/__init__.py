"""Patches for images and sound."""
