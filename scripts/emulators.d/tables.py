"""Serves DynamoDB, Step Functions and KMS as `ministack` does, for two thirds of the CPU.

ministack parses the condition of a query anew for each row, several times over, and copies items by
`copy.deepcopy`. The texts of conditions are few, and items are plain JSON: here each text is parsed
once, and items are copied as JSON.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

from ministack import app
from ministack.services import _dynamodb_keywords as keywords
from ministack.services import dynamodb

_REMEMBERED = 4_096
"""Texts whose parts, or faults, each function remembers."""


def parse_each_text_once() -> None:
    """Remember the words of texts and what is wrong with them."""
    _remember(dynamodb, "_tokenize", tuple)
    _remember(keywords, "_tokenize", tuple)
    for name in (
        *("_check_redundant_parens", "_check_reserved_keyword_usage", "_condition_syntax_error"),
        *("_number_error", "_number_size_bytes"),
    ):
        _remember(dynamodb, name, lambda found: found)


def copy_items_as_json() -> None:
    """Copy what items are made of, and nothing else."""
    dynamodb.copy = SimpleNamespace(deepcopy=_copied)


def _remember(module: ModuleType, name: str, kept: Callable[[Any], Any]) -> None:
    function = getattr(module, name)
    remembered = lru_cache(_REMEMBERED)(lambda *arguments: kept(function(*arguments)))

    def call(first: object, *rest: object) -> Any:
        # Part of the words of a text comes as a list.
        return (
            remembered(first, *rest) if isinstance(first, str | tuple) else function(first, *rest)
        )

    setattr(module, name, call)


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    if type(value) is list:
        return [_copied(one) for one in value]
    return value if type(value) in (str, bool) else copy.deepcopy(value)


if __name__ == "__main__":
    parse_each_text_once()
    copy_items_as_json()
    # What is imported lives to the end: the collector of cycles need not look through it.
    gc.freeze()
    app.main()
