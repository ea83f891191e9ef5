"""Show what policies will do and did: plan, audit, attributions, pictures."""
