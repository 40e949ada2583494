"""Who makes the elements in this process: the consumer's thread, or threads that read ahead."""
