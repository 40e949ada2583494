"""What is done around training: lengths of documents, and the command line, which looks at files and converts them."""

from millstream.tools.lengths import lengths_of

__all__ = ["lengths_of"]
