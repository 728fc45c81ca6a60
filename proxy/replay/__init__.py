"""Recorded conversations played through policies as a client would send them to a Weir, without a model.

Every request of a recording goes through one scenario per policy, one unmanaged and one with a sliding window. What
each forwards is compared with what it forwarded before, as a provider's prompt cache does, and priced.
"""
