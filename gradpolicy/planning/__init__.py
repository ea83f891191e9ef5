"""The plan: what each policy will touch, found out by one step of a copy of the model."""
