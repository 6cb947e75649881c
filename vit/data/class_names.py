"""Names of classes: their order, the choice of some of them, and their words."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from vit.runtime.arguments import check_choice


def sort_class_names(class_names: Iterable[str]) -> tuple[str, ...]:
    """Sort class names: whole numbers as numbers, so that 9 comes before 10, then the others as
    text."""
    names = set(class_names)
    numbers = {name for name in names if re.fullmatch(r"-?[0-9]{1,18}", name)}
    return (*sorted(sorted(numbers), key=int), *sorted(names - numbers))


def choose_classes(
    class_names: Sequence[str], classes: Sequence[str], words: Mapping[str, str]
) -> tuple[str, ...]:
    """Choose the classes that `data.classes` keeps, each by its name or in words, such as "tench"
    for n01440764. Raises ValueError if one is unknown."""
    known = {*class_names, *words.values()}
    for name in classes:
        check_choice(name, known, name="class of data.classes")
    # the order is that of the set, so that labels don't depend on how classes are listed
    return tuple(name for name in class_names if {name, words[name]} & set(classes))


def find_wordnet_names(class_names: Collection[str]) -> dict[str, str]:
    """Find the names in words of classes that are WordNet ids, "chain saw" for n03000684, as far as
    timm's table has them: class → the first synonym. Empty if some classes are no such ids."""
    if not all(re.fullmatch(r"n\d{8}", name) for name in class_names):
        return {}
    # takes seconds to import
    from timm.data import ImageNetInfo

    table = ImageNetInfo()
    words = {}
    for name in class_names:
        with suppress(KeyError):
            words[name] = table.label_name_to_description(name).split(",")[0].strip()
    return words


def name_classes(class_names: Iterable[str], words: Mapping[str, str]) -> dict[str, str]:
    """Return class → its name in words, or itself if it has none. The class is put behind a name
    that several classes have, as "crane"."""
    names = {name: words.get(name, name) for name in class_names}
    counts = Counter(names.values())
    return {name: word if counts[word] == 1 else f"{word} ({name})" for name, word in names.items()}
