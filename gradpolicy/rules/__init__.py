"""WHAT happens to a gradient: the backward rules, one small file a family."""

from gradpolicy.rules.registry import Rule, get_rule, rule, rule_names

__all__ = ["Rule", "get_rule", "rule", "rule_names"]
