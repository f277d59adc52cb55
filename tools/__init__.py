"""What maintains the repository: generated pages, the matrix of stacks, upstream's tests, fingerprints."""
