"""What SECURITY.md promises of files from strangers."""
