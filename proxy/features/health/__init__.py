"""How well conversations are kept in their windows."""
