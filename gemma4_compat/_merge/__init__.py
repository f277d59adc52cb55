"""The command ``merge``: an adapter merged into its base, with measured parity."""
