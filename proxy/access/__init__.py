"""Who is calling, what they may request, and where it goes."""
