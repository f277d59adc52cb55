"""Patches for device maps, and for models split over devices."""
