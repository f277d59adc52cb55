"""Placements on a small card, and what one could do instead."""
