"""What is kept of a request for who looks at it, and its two sides."""
