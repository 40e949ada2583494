"""Monitoring of a running trainer by another process of the same user, over a private socket."""
