"""Records in files: several files as one source, their indices and their copies."""
