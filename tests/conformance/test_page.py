"""The cases cover the documents, and docs/conformance.md is their list with what came of each."""

import importlib

import pytest
from document_blocks import CASES, PAGE, PASSED, list_cases, read_inventory, write_page
from seed_documents import SEEDS, read_blocks, read_imports

IMPORTS = [line.split("\t") for line in (CASES / "imports.tsv").read_text().splitlines()]
needs_seeds = pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents are not in this tree")


def test_every_block_of_the_documents_has_a_case():
    assert {(case.document, case.block) for case in list_cases()} == set(read_inventory())


def test_the_page_is_that_of_the_cases_and_all_pass():
    everything_passes = {case.test: PASSED for case in list_cases()}
    assert PAGE.read_text() == write_page(everything_passes), "make conformance"


def test_a_case_that_fails_shows():
    outcomes = {case.test: PASSED for case in list_cases()}
    first = next(iter(outcomes))
    assert "| FAILS |" in write_page({**outcomes, first: "FAILS"})


@needs_seeds
def test_the_inventory_is_that_of_the_documents():
    found = {
        (block.document, block.ordinal): (block.language, block.section)
        for path in SEEDS.glob("00*.txt")
        for block in read_blocks(path)
    }
    assert read_inventory() == found


@needs_seeds
def test_the_imports_are_those_of_the_documents():
    found = {
        (path.name[:3], *pair) for path in SEEDS.glob("00*.txt") for pair in read_imports(path)
    }
    assert {tuple(row) for row in IMPORTS} == found


@pytest.mark.parametrize("document", sorted({row[0] for row in IMPORTS}))
def test_every_import_of_a_document_works(document):
    for _, module, name in (row for row in IMPORTS if row[0] == document):
        imported = importlib.import_module(module)
        try:
            assert getattr(imported, name) is not None
        except AttributeError:  # `from package import module` finds modules too
            assert importlib.import_module(f"{module}.{name}")
