"""Tells what policies will do and what they did: the plan, the audit, attributions and pictures."""
