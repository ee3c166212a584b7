"""A course, and the trainer it grows into, on how DeepSeek-class language models are trained."""

__version__ = "0.1.0"
