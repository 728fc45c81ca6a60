"""What is known about a model: its window and prices by name, and the limits that hold on one
upstream.
"""
