"""Draws the README's picture: the report of the default job, as a browser shows it."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
BROWSERS = ("chromium", "google-chrome")
SIZE = (850, 1120)
# Without the parts of the report for which the picture has no room.
STYLE = """<style>
main { max-width: none; padding: 12px; }
nav, tr.remark, [id^=asked], [id^=masks], [id^=memory], [id^=audit], [id^=warnings], [id^=versions],
[id^=pictures], [id^=flow], [id^=results] .figure:nth-child(n+3) { display: none; }
</style>"""


def overview() -> Image.Image:
    """Run the default job and return a screenshot of its report."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise RuntimeError(f"the screenshot needs a browser: install {' or '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        settings = ["seed=0", "logger=csv", f"hydra.run.dir={place / 'default_job'}"]
        job = [sys.executable, str(ROOT / "train.py"), *settings]
        subprocess.run(job, check=True, cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)})
        return taken(place / "default_job" / "report.html", browser)


def taken(report: Path, browser: str) -> Image.Image:
    """Return a screenshot of a report."""
    page, picture = report.with_name("overview.html"), report.with_name("overview.png")
    page.write_text(report.read_text("utf-8").replace("</head>", f"{STYLE}</head>", 1), "utf-8")
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        "--virtual-time-budget=8000",
    ]
    size = f"--window-size={SIZE[0]},{SIZE[1]}"
    subprocess.run([browser, *options, size, f"--screenshot={picture}", page.as_uri()], check=True)
    with Image.open(picture) as image:
        return image.convert("RGB")


PICTURES = {"overview": overview}
