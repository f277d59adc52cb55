"""Masks, kernels, and what attention makes of a query that sees no key."""
