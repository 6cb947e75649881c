"""Readable names of classes: a text file beside the data, or what a model file recorded of one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from vit.runtime.files import read_text


def read_words(path: Path) -> dict[str, str]:
    """Of each line "wnid tench, Tinca tinca" its first word and the first of the names behind it."""
    pairs = [line.split(maxsplit=1) for line in read_text(path).splitlines() if line.strip()]
    return {pair[0]: pair[1].split(",")[0].strip() for pair in pairs if len(pair) == 2}


def name_classes(class_names: Sequence[str], given: Path | Mapping[str, str]) -> tuple[str, ...]:
    """`class_names` in words: those that a mapping has, or all from a text file, in which a line is a class and its
    name or, in the order of the classes (of numbers: line 0 first), the name alone. Raises ValueError for a file that
    doesn't fit the classes."""
    if not isinstance(given, Path):
        return make_unique({name: given.get(name, name) for name in class_names})
    words = read_words(given)
    if all(name in words for name in class_names):
        return make_unique({name: words[name] for name in class_names})
    lines = [line.strip() for line in read_text(given).splitlines() if line.strip()]
    if all(name.isdecimal() for name in class_names) and max(map(int, class_names)) < len(lines):
        return make_unique({name: lines[int(name)] for name in class_names})
    if len(lines) != len(class_names):
        missing = next(name for name in class_names if name not in words)
        both = f"{len(lines)} lines for {len(class_names)} classes"
        raise ValueError(
            f"data.class_names {given} has {both} and none for {missing!r}; write a class and its name a line"
        )
    return make_unique(dict(zip(class_names, lines, strict=True)))


def make_unique(names: Mapping[str, str]) -> tuple[str, ...]:
    """The names of classes, with the class behind a name that several have: "crane" is a bird and a machine."""
    uses = Counter(names.values())
    return tuple(name if uses[name] == 1 else f"{name} ({of_class})" for of_class, name in names.items())
