"""Who makes the elements in other processes: a fork server, the workers, and the pool of them that a trainer has."""
