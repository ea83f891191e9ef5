"""Compiles the C kernels when the package is built.

A wheel without them works: torch does what the kernels would.
"""

import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildWithKernels(build_py):
    """Builds the package, with its C kernels beside their sources."""

    def run(self) -> None:
        """Build."""
        super().run()
        root = HERE if self.editable_mode else Path(self.build_lib)
        build_all = runpy.run_path(str(HERE / "gradpolicy" / "compiling.py"))["build_all"]
        try:
            build_all(root / "gradpolicy")
        except Exception as error:
            print(f"gradpolicy: the C kernels were not compiled: {error}", file=sys.stderr)


class WheelForOnePlatform(bdist_wheel):
    """A wheel for every Python of one platform: it holds libraries, but none that knows Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag."""
        return "py3", "none", super().get_tag()[2]


class WithLibraries(Distribution):
    """A distribution that belongs to a platform."""

    def has_ext_modules(self) -> bool:
        """Whether there is compiled code."""
        return True


setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForOnePlatform})
