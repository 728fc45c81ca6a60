"""Asking a model for a summary: within an allowance, once for all who want it, kept for who asks again."""
