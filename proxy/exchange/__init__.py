"""One request of the managed route, from bytes to bytes."""
