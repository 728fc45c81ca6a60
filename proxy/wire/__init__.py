"""Client JSON to values and back, with the client's bytes kept. Pure."""
