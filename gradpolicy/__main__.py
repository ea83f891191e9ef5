"""``python -m gradpolicy`` is the command `gradpolicy`."""

import sys

from gradpolicy.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
