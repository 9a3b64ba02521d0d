"""The shape of a run's results: its bodies by size and by Content-Type.

It shows at a glance that many bodies are suspiciously small, or of a type that nobody asked for. It
moves with the counters of the run, in the step that settles a task.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

SIZE_BOUNDS = (1, 1_024, 10_240, 51_200, 102_400, 512_000, 5_242_880)
"""The least bytes of a body in the second to the last of the size classes; the first is empty
bodies."""
SIZE_CLASSES = len(SIZE_BOUNDS) + 1
MOST_TYPES = 16
OTHER_TYPE = "other"
LONGEST_TYPE = 60


class ResultShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bodies of a run by size class, and by media type: the first MOST_TYPES that came, and
    OTHER_TYPE. The bodies taken over from an earlier run are included."""

    sizes: tuple[int, ...] = (0,) * SIZE_CLASSES
    types: Mapping[str, int] = {}


def size_class(size: int) -> int:
    """Return the class of a body of `size` bytes, from 0 to SIZE_CLASSES - 1."""
    return bisect_right(SIZE_BOUNDS, size)


@lru_cache(1_024)
def media_type(content_type: str) -> str:
    """Reduce a Content-Type to its media type, in lower case and of bounded length."""
    return content_type.partition(";")[0].strip().lower()[:LONGEST_TYPE] or OTHER_TYPE


def counted_type(content_type: str, counted: Mapping[str, int]) -> str:
    """Return the name under which a body counts beside the types that are `counted` already."""
    name = media_type(content_type)
    return name if name in counted or len(counted) < MOST_TYPES else OTHER_TYPE


@dataclass(slots=True)
class ShapeCounter:
    """A shape while a store adds to it."""

    sizes: list[int]
    types: dict[str, int]

    @classmethod
    def of(cls, shape: ResultShape) -> ShapeCounter:
        """Begin with a shape."""
        return cls(list(shape.sizes), dict(shape.types))

    def add(self, size: int, content_type: str, count: int = 1) -> None:
        """Account for `count` bodies."""
        self.sizes[bisect_right(SIZE_BOUNDS, size)] += count
        name = media_type(content_type)
        if name in self.types:
            self.types[name] += count
        else:
            name = counted_type(content_type, self.types)
            self.types[name] = self.types.get(name, 0) + count

    def shape(self) -> ResultShape:
        """Return the shape as it is now."""
        return ResultShape(tuple(self.sizes), dict(self.types))
