"""Sources of files that contain records."""
