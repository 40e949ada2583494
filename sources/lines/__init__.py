"""Sources of text files with a record per line."""
