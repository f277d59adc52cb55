"""Files that users have, read within bounds: a file that is too large, too deep or of other types is one error."""
