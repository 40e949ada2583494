"""One reader for all processes of a host that need the same batches.

Processes with the same stream, shard, user and job form a group. The first of them listens on a socket in Linux's
abstract namespace, whose name is a hash of these. Its *reader*, a thread, runs the executor and writes each output to
anonymous memory. All members connect, the process of the reader included, and receive descriptors of this memory.

Guarantees:
    * An output is found by the position that it begins at, so a member gets exactly its own stream, or reads by itself.
    * A process that dies leaves nothing: neither the name nor the memory belongs to a file. The members then have what
      the reader had sent, and the first of them that needs more becomes the next reader, from its own position.
    * A member that does not get on holds the others up for PATIENCE_SECONDS. It then reads by itself, and so does one
      that waits for half of the stall timeout, for instance because the process of the reader is stopped.
    * The memory of outputs that not all members have read is at most MAX_UNREAD_BYTES, or MIN_KEPT outputs.
    * Only processes of the same user are answered, and only their messages are read.
"""
