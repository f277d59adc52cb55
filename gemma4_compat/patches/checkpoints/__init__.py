"""Patches for loading and saving whole models."""
