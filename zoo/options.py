"""Refusals of options out of their range, in one wording: whose option, what was given, what is allowed."""

from collections.abc import Collection

SPLITS = ("train", "eval")  # of every data set


def at_least(smallest: float, of: str, why: str = "", /, **options: float) -> None:
    """Refuse options less than `smallest`, of a model, say; `why` says in brackets what needs so many.

    Raises:
        ValueError: names the first that is less.
    """
    for name, value in options.items():
        if value < smallest:
            raise ValueError(f"{of}: {name} is {value}, allowed is {smallest} or more{why and f' ({why})'}")


def more_than(bound: float, of: str, why: str = "", /, **options: float) -> None:
    """Refuse options that are a bound or less; see `at_least`.

    Raises:
        ValueError: names the first.
    """
    for name, value in options.items():
        if value <= bound:
            raise ValueError(f"{of}: {name} is {value}, allowed is more than {bound}{why and f' ({why})'}")


def below_one(of: str, /, **options: float) -> None:
    """Refuse probabilities that are not from 0 to below 1; see `at_least`.

    Raises:
        ValueError: names the first.
    """
    for name, value in options.items():
        if not 0 <= value < 1:
            raise ValueError(f"{of}: {name} is {value}, allowed is 0 to below 1")


def one_of(allowed: Collection[str], of: str, /, **options: str) -> None:
    """Refuse options that are none of some words; see `at_least`.

    Raises:
        ValueError: names the first.
    """
    for name, value in options.items():
        if value not in allowed:
            raise ValueError(f"{of}: {name} is {value!r}, allowed are {', '.join(allowed)}")


def check_split(of: str, split: str) -> None:
    """Refuse what is none of `SPLITS`; see `at_least`."""
    one_of(SPLITS, of, split=split)


def one_size(of: str, *, because: str, source_vocabulary: int, target_vocabulary: int) -> None:
    """Refuse a model's vocabularies of unequal sizes where one embedding is shared, `because` of a true option.

    Raises:
        ValueError: they are unequal.
    """
    if source_vocabulary != target_vocabulary:
        raise ValueError(
            f"{of}: {because} is true, allowed is false for vocabularies of unequal sizes, here "
            f"{source_vocabulary} and {target_vocabulary}"
        )
