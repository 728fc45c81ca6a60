"""Policies as files: presets, layers, what is wrong with one, and what other tools' settings become."""
