"""Tables: the memory of Arrow as columns and records, and the row groups of Parquet files."""
