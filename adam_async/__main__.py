"""`python -m adam_async`, the same command as `adam-async`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the working directory first, so a file there would replace a library.
    packages = str(Path(__file__).resolve().parents[1])
    if not sys.flags.safe_path and sys.path[0] != packages:
        del sys.path[0]

    from adam_async.cli.main import main

    sys.exit(main())
