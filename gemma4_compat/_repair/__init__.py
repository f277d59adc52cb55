"""Checkpoints that lack weights or files, completed."""
