"""`gradpolicy attribute`, from a clone."""

import sys

from gradpolicy.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["attribute", *sys.argv[1:]]))
