"""From a model and images to logits, features, classes and prediction sets."""
