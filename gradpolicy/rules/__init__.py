"""The backward rules, one file per family.

Every file registers its rules when it is imported, and this module imports every file, so a new family needs
only a new file.
"""

import importlib
import pkgutil

from gradpolicy.rules.registry import Rule, get_rule, rule, rule_names

__all__ = ["Rule", "get_rule", "rule", "rule_names"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
