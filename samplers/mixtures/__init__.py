"""Mixtures of several orders, in exact proportions."""
