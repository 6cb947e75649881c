"""The version, which model files and results record."""

__version__ = "0.2.0"
