"""`gradpolicy report`, from a clone."""

import sys

from gradpolicy.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
