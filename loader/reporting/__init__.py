"""Reports on a loader as pure functions of data: advice, tables, metrics and renderings."""
