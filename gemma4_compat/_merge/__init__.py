"""The commands ``merge``, an adapter merged into its base with measured parity, and ``repair``."""
