"""The command ``scan``: what a saved adapter is and what it would do on a base model."""
