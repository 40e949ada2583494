"""`python -m millstream`: looks at files of records, converts and indexes them."""

import sys

from millstream.tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
