"""A tiny Gemma 4 that has learned something, and how it was made; docs/TRAINED_MODEL.md says what it is for."""
