"""The plan: what each policy will touch, found by a step of a copy."""
