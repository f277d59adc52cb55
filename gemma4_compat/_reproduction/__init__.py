"""Tiny models, and the scenarios in which a reproduction shows a defect."""
