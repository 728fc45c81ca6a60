"""Recorded conversations played through policies without a model, compared request by request as a
provider's prompt cache does, and priced.
"""
