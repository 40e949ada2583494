"""Where the bytes of files are: paths, disks, buckets, what is kept of them here, and how many files are open."""
