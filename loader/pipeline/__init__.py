"""What the elements of a stream are, and in which order: nothing here knows of threads, processes or time."""
