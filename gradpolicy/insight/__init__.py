"""Observes runs: the record, the audit, the report, attribution, curvature, pictures."""
