"""An object that leaves a trace if a file is read by running what is in it."""

import os
from pathlib import Path
from typing import Any


class MakesFolder:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)
