"""Write a model for other runtimes."""
