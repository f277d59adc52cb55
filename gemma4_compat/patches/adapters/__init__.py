"""Patches for loading, creating and merging adapters."""
