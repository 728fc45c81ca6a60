"""What is watched while requests go by: health and alerts, prompt caches and costs, compactions judged now and then."""
