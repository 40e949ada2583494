"""Formats of files: one module per format, which no other module imports, because `file_formats` finds it by name."""
