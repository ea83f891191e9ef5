"""One training run under policies, and what drives it: loops, Lightning, processes."""
