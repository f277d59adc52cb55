"""Files within bounds: memory, time, one error."""
