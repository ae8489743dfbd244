"""`python -m adam_async`, the same command as `adam-async`."""

import sys

from adam_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
