"""Loading, merging and exporting adapters."""
