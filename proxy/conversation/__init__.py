"""Which conversation a request belongs to, and what is known of it while the process lives."""
