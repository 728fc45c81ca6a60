"""What texts say, found by code: rules, claims, findings, identifiers, conclusions, and extracts that keep them."""
