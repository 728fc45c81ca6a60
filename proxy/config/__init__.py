"""The configuration: YAML, environment and flags become one frozen ``Config``, which is checked
before it is used.

``values`` says what there is, ``file`` reads it, ``loading`` puts it together and keeps a running
Weir at what its files say; a policy is made from its preset in ``presets`` and judged in ``lint``.
"""
