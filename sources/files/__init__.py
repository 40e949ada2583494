"""Records in many files laid end to end: what every format of files shares, and formats of spans of bytes above all."""
