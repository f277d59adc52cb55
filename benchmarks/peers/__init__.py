"""Other software that decodes the same weights."""
