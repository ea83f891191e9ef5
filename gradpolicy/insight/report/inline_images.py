"""Pictures as data in the page, small enough for it."""

import base64
import io
from pathlib import Path

from PIL import Image

WIDEST = 1100  # pixels
LARGEST = 160_000  # bytes of one picture


def inlined(path: Path, most: int = LARGEST) -> str:
    """A picture as a ``data:`` address, shrunk until it is small enough.

    Args:
        path: A picture.
        most: The most bytes that the picture may have.

    Raises:
        OSError: If it cannot be read.
    """
    content = path.read_bytes()
    kind = "png"
    if len(content) > most:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        kind = "jpeg"
        width = min(image.width, WIDEST)
        while True:
            resized = image.resize((width, max(1, image.height * width // image.width)))
            buffer = io.BytesIO()
            resized.save(buffer, "JPEG", quality=80, optimize=True)
            content = buffer.getvalue()
            if len(content) <= most or width < 64:
                break
            width = width * 3 // 4
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
