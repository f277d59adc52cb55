"""Arms, applies and undoes patches. Knows nothing about Gemma 4, and nothing about reproductions."""
