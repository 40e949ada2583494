"""Threads that read and compute in the trainer's process, and bounded waits for them."""
