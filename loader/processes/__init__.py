"""Worker processes: the fork server, the workers, and the trainer's pool of them."""
