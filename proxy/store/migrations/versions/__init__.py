"""One file a revision, the oldest first by what each names as the one before."""
