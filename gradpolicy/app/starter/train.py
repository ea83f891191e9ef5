"""Train the model under the policies of conf/; see ``python train.py --help``."""

import sys
from pathlib import Path

from gradpolicy.app.cli import main

if __name__ == "__main__":
    sys.exit(main(config_dir=Path(__file__).parent / "conf"))
