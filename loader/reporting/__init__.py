"""What people are shown of a loader: advice, tables, metrics and pictures, as pure functions of data."""
