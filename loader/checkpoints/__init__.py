"""Where a stream was, and which stream it was: states, fingerprints, and Orbax."""
