"""A mixture of experts whose experts stay in host memory; rows read from a disk."""
