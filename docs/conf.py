"""Configuration of Sphinx, which builds the site from this folder: ``make docs``."""

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

# The pages also render on GitHub: use its anchors, and ```mermaid fences for diagrams.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# Render diagrams at build time, so that pages load no remote script.
mermaid_output_format = "svg"
mermaid_cmd = "mermaidx"
mermaid_params = ["--background", "white"]
myst_enable_extensions = ["colon_fence"]
# Notebooks are stored without outputs; the build executes each in a temporary folder.
nb_execution_mode = "auto"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# Merge consecutive prints of a cell into one block.
nb_merge_streams = True
# Lets notebooks find the command `gradpolicy`.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# `make links` cannot check local servers.
linkcheck_ignore = [r"http://localhost:\d+"]

html_theme = "furo"
html_title = f"gradpolicy {release}"
# Copy the input of examples, without prompts.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

FOLDER_PAGE = "\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages}\n```\n"


def has_pages(line: str) -> bool:
    """Return True unless an entry of a table of contents is a glob without a page."""
    return not line.endswith("/*") or any(Path(__file__).parent.glob(f"{line}.md"))


def for_the_site(app: Sphinx, name: str, source: list[str]) -> None:
    """Add what only the site needs to the source of a page."""
    if name.endswith("/README"):
        source[0] += FOLDER_PAGE.format(pages="*")
    elif name == "index":
        # A glob without a match would be a warning.
        source[0] = "\n".join(line for line in source[0].split("\n") if has_pages(line))
    # Files outside `docs` have pages of their own on the site.
    source[0] = source[0].replace("](../CONTRIBUTING.md)", "](project.md)")
    source[0] = source[0].replace("](../CHANGELOG.md)", "](project.md)")


def setup(app: Sphinx) -> None:
    """Register the extension with Sphinx."""
    app.connect("source-read", for_the_site)
