"""Executors in the trainer's process: in the consumer's thread, or in threads that read ahead."""
