"""A running trainer that is asked from outside, by its own user only: a private socket, and who speaks over it."""
