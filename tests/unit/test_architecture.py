"""The bounds of docs/architecture.md hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.architecture.__main__ import BEGIN, DOCUMENT, END, is_stale, with_table
from tests.architecture.figures import (
    LEAST_MEAN_LINES,
    MOST_CYCLES,
    MOST_DYNAMODB,
    MOST_FILES,
    MOST_LONELY,
    MOST_PASSED,
    MOST_UPWARD,
    Figures,
    measure,
)
from tests.architecture.graph import (
    cycles,
    lonely_modules,
    parse_layers,
    read_layers,
    unplaced_rooms,
    upward_arrows,
)
from tests.architecture.rules import handlers_with_binding, long_signatures, shared_names
from tests.architecture.source import Module, code_lines, import_graph, read_modules
from tests.architecture.walk import files_one_url_passes

KNOWN_SHARED_NAMES: list[str] = []
"""Names that several public types have today. The goal is an empty list."""

KNOWN_LONG_SIGNATURES: list[str] = []
"""Functions with too many parameters today. The goal is at most five."""

KNOWN_WITH_BINDING: list[str] = []
"""Handlers that take a whole binding today. The goal is an empty list."""


@pytest.fixture(scope="module")
def figures() -> Figures:
    """Return the figures that the source alone gives."""
    return measure(passed=())


@pytest.fixture(scope="module")
def passed() -> Sequence[str]:
    """The files that one URL passes, which takes a while to find out."""
    return files_one_url_passes(most=MOST_PASSED)


# -- bounds --


def test_the_package_is_cut_into_few_files(figures: Figures) -> None:
    assert figures.files <= MOST_FILES
    assert figures.mean >= LEAST_MEAN_LINES


def test_the_largest_adapter_stays_in_few_files(figures: Figures) -> None:
    assert figures.dynamodb <= MOST_DYNAMODB, (
        "put the code into the module of its topic; if it needs a file, first join two others"
    )


def test_few_small_modules_have_one_importer(figures: Figures) -> None:
    assert len(figures.lonely) <= MOST_LONELY, figures.lonely


def test_imports_make_no_cycles_lazy_ones_and_those_for_types_included(figures: Figures) -> None:
    assert len(figures.cycles) <= MOST_CYCLES, figures.cycles


def test_no_arrow_goes_up(figures: Figures) -> None:
    assert len(figures.upward) <= MOST_UPWARD, figures.upward


def test_every_room_has_a_layer() -> None:
    assert unplaced_rooms(read_modules(), read_layers()) == []


@pytest.mark.slow
def test_one_url_passes_few_files(passed: Sequence[str]) -> None:
    # A walk that saw nothing would be short too.
    assert "conveyor/http/app.py" in passed
    assert any(path.startswith("conveyor/dev/sqlite/") for path in passed)
    assert len(passed) <= MOST_PASSED, passed


@pytest.mark.slow
def test_the_documents_table_is_up_to_date(passed: Sequence[str]) -> None:
    document = DOCUMENT.read_text()

    assert not is_stale(document, measure(passed).table()), "run: scripts/architecture"


# -- fences: a list that names what is not there any more fails too, so that it shrinks --


def test_no_two_public_types_share_a_name_but_adapters_of_one_port(figures: Figures) -> None:
    assert list(figures.shared) == KNOWN_SHARED_NAMES


def test_no_function_has_many_parameters(figures: Figures) -> None:
    assert list(figures.long_signatures) == KNOWN_LONG_SIGNATURES


def test_no_handler_takes_a_whole_binding(figures: Figures) -> None:
    assert list(figures.with_binding) == KNOWN_WITH_BINDING


# -- the measures themselves --


def package(**texts: str) -> dict[str, Module]:
    """Make modules of a package `conveyor` out of texts; `a__b` names `conveyor.a.b`."""
    names = {f"conveyor.{name.replace('__', '.')}": text for name, text in texts.items()}
    return {
        name: Module(name, f"{name.replace('.', '/')}.py", text) for name, text in names.items()
    }


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    text = '"""Doc\n\nof two."""\n\n# why\nx = 1  # one\n"""Of x."""\ny = """a\n\nb"""\n'

    assert code_lines(text) == {6, 8, 10}


def test_lazy_imports_and_those_for_types_are_imports() -> None:
    modules = package(
        dev__one="def f():\n    from conveyor.dev import two\n",
        dev__two="if TYPE_CHECKING:\n    from conveyor.dev.three import Three\n",
        dev__three="import conveyor.dev.one\n",
        dev__four="from conveyor.dev.one import f\nfrom conveyor.dev.absent import g\n",
    )

    assert cycles(import_graph(modules)) == [
        ["conveyor.dev.one", "conveyor.dev.three", "conveyor.dev.two"]
    ]


def test_a_package_that_imports_its_child_is_imported_back() -> None:
    modules = package(
        dev="from conveyor.dev.child import f\n", dev__child="from conveyor.dev import g\n"
    )

    assert cycles(import_graph(modules)) == [["conveyor.dev", "conveyor.dev.child"]]


def test_a_small_module_with_one_importer_is_lonely() -> None:
    modules = package(
        dev__small="x = 1\n",
        dev__large="x = 1\n" * 80,
        dev__shared="x = 1\n",
        dev__one="from conveyor.dev import large, shared, small\n",
        dev__two="from conveyor.dev import shared\n",
    )
    lonely = lonely_modules(modules, import_graph(modules))

    assert [(one.name, one.importer) for one in lonely] == [
        ("conveyor.dev.small", "conveyor.dev.one")
    ]


def test_arrows_go_down_and_not_between_independent_rooms() -> None:
    modules = package(
        cli="from conveyor import dev, prod\n",
        dev="import conveyor.prod\nimport conveyor.ports\n",
        ports="import conveyor.cli\nimport conveyor.intake\n",
        prod="",
        intake="",
    )
    layers = parse_layers(["cli", "dev | prod", "ports : intake"])

    assert upward_arrows(modules, import_graph(modules), layers) == [
        "conveyor.dev imports conveyor.prod",
        "conveyor.ports imports conveyor.cli",
    ]


PORT = "class Things(Protocol):\n    async def get(self): ...\n    async def put(self): ...\n"
ADAPTER = "class Store:\n    async def get(self): ...\n    async def put(self): ...\n"


@pytest.mark.parametrize(
    ("texts", "shared"),
    [
        pytest.param({"dev": ADAPTER, "prod": ADAPTER}, [], id="adapters-by-methods"),
        pytest.param(
            {"dev": "class S(Things): ...", "prod": "class S(Things): ..."}, [], id="by-base"
        ),
        pytest.param({"dev": ADAPTER, "http": ADAPTER}, ["Store"], id="no-room-of-adapters"),
        pytest.param({"dev": ADAPTER, "prod": "class Store: ..."}, ["Store"], id="one-adapter"),
        pytest.param({"dev": "class _S: ...", "prod": "class _S: ..."}, [], id="private"),
        pytest.param(
            {"dev": "Key = NewType('Key', str)", "http": "class Key(Enum): ..."},
            ["Key"],
            id="new-type",
        ),
    ],
)
def test_public_types_that_share_a_name(texts: Mapping[str, str], shared: list[str]) -> None:
    assert list(shared_names(package(ports__things=PORT, **texts))) == shared


def test_parameters_are_counted_without_self() -> None:
    modules = package(
        dev="class A:\n"
        "    def most(self, a, b, c, d, /, e, *f, **g): ...\n"
        "    def more(self, a, b, c, d, /, e, *f, g, **h): ...\n"
        "def outer():\n"
        "    async def inner(a, b, c, d, e, f, g, h): ...\n"
    )

    assert long_signatures(modules) == ["A.more", "outer.inner"]


def test_handlers_take_a_binding_as_a_parameter_or_a_field() -> None:
    modules = package(
        handlers__one="class A:\n    def __init__(self, given: 'Binding | None'): ...\n",
        handlers__two="class B:\n    binding: ports.Binding\n    other: BindingOptions\n",
        engine="def f(binding: Binding): ...\n",
    )

    assert handlers_with_binding(modules) == ["A.__init__", "B"]


def test_the_table_stands_between_its_markers() -> None:
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    renewed = with_table(document, "| new |")

    assert renewed == f"before\n{BEGIN}\n\n| new |\n\n{END}\nafter\n"
    assert with_table(renewed, "| new |") == renewed
    with pytest.raises(ValueError, match="needs the lines"):
        with_table("no markers", "| new |")


def test_only_lines_of_code_may_differ_from_the_table() -> None:
    document = f"{BEGIN}\n\n| files | 2 |\n| lines of code | 20 |\n\n{END}\n"

    assert not is_stale(document, "| files | 2 |\n| lines of code | 21 |")
    assert is_stale(document, "| files | 3 |\n| lines of code | 20 |")
