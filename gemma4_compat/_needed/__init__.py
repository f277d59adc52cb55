"""The command ``needed``: which patches the pins of a project still need."""
