"""Read users' files within bounds: a file that is too large, nested too deeply or has wrong types is an error."""
