"""One module or folder for each feature, with what it adds to Weir.

What an exchange names itself (recall, compactions, history that a provider holds, cache use, the
health of a conversation) is below it; what only answers requests about what is stored is above
``proxy.http``. The layers are in ``pyproject.toml``.
"""
