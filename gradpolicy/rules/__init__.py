"""The backward rules, one small file a family.

Every file of this package registers its rules when it is imported, and every file is imported here:
a new family is one new file, nothing else touched.
"""

import importlib
import pkgutil

from gradpolicy.rules.registry import Rule, get_rule, rule, rule_names

__all__ = ["Rule", "get_rule", "rule", "rule_names"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
