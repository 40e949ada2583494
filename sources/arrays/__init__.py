"""Sources of files that contain arrays or tokens."""
