"""Joins: streams that draw from other streams. Each module has a step and its iterator."""
