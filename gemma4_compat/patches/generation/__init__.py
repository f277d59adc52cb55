"""Patches for caches, chunked prefills and assistant models."""
