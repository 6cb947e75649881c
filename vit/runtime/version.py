"""The version, which model files and results record, and those of the libraries."""

__version__ = "0.2.0"


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a result depends on."""
    # `import vit` does without
    import platform
    from importlib.metadata import version

    libraries = ("torch", "torchvision", "timm", "numpy", "safetensors")
    return {
        "vit": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
    }
