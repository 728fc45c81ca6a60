"""Who is calling, what may be asked in that name, and where it goes."""
