"""The plan: what each policy affects, determined by one step on a copy."""
