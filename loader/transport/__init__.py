"""How pipelines and elements get from one process to another: pickles, shared memory, mapped files."""
