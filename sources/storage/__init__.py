"""Files as bytes: paths and URLs, disks and object stores, indices and caches."""
