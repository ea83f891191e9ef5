"""How Sphinx builds the site from the Markdown of this folder: ``make docs``."""

import os
import sys
from pathlib import Path

from sphinx.application import Sphinx

import gradpolicy

project = "gradpolicy"
author = "the authors of gradpolicy"
version = release = gradpolicy.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
    "sphinx_copybutton",
]
exclude_patterns = ["build"]

# The pages are written for GitHub: anchors are GitHub's, and a mermaid fence is a diagram.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# Drawn when the site is built: a browser would load the script from elsewhere.
mermaid_output_format = "svg"
mermaid_cmd = "mermaidx"
mermaid_params = ["--background", "white"]
myst_enable_extensions = ["colon_fence"]
# The notebooks are text without outputs: the site executes them, each in a folder of its own.
nb_execution_mode = "auto"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# What a loop prints is one block.
nb_merge_streams = True
# Where the command `gradpolicy` is.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# `make links`: what a program of one's own serves is not there.
linkcheck_ignore = [r"http://localhost:\d+"]

html_theme = "furo"
html_title = f"gradpolicy {release}"
# Nothing of a copied example but what a person types.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

FOLDER_PAGE = "\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages}\n```\n"


def has_pages(line: str) -> bool:
    """Whether a line of a table of contents names a page; a line without a glob always counts."""
    return not line.endswith("*") or any(Path(__file__).parent.glob(f"{line}.md"))


def for_the_site(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds to a Markdown page what only the site needs, so that the page reads well on GitHub too."""
    if name.endswith("/README"):
        source[0] += FOLDER_PAGE.format(pages="*")
    elif name == "insight":
        source[0] += FOLDER_PAGE.format(pages="insight/*")
    elif name == "index":
        # A glob that matches no page yet would be a warning.
        source[0] = "\n".join(line for line in source[0].split("\n") if has_pages(line))
    # What lies beside `docs` on GitHub is a page of the site.
    source[0] = source[0].replace("](../CONTRIBUTING.md)", "](contributing.md)")
    source[0] = source[0].replace("](../CHANGELOG.md)", "](changelog.md)")


def setup(app: Sphinx) -> None:
    """Tells Sphinx what to call."""
    app.connect("source-read", for_the_site)
