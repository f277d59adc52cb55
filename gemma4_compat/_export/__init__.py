"""The command ``export``: a saved adapter in the keys and the configuration of another reader."""
