"""The configuration: YAML, environment and flags become one frozen ``Config``, which is checked
before it is used.

``values`` says what there is, ``file`` reads it, ``loading`` puts it together and applies changed
files to a running Weir; a policy is made from its preset in ``presets`` and checked in ``lint``.
"""
