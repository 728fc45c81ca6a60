"""A body that comes in, and an answer that goes out as it comes."""
