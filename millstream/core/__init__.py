"""Modules that every part of the library may use."""
