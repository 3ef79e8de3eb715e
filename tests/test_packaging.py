# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What is shipped: packages, package data, version, and the examples of the docstrings."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import importlib.resources
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import fp4kit

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
needs_checkout = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="needs the source checkout"
)


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def expected_packages() -> set[str]:
    """Import names of every folder that holds an __init__.py, as installed."""
    found = set()
    for top, prefix in (
        ("fp4kit", "fp4kit"),
        ("cli", "fp4kit.cli"),
        ("kernels_cu", "fp4kit.kernels_cu"),
    ):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / top).parts
            found.add(".".join((prefix, *parts)))
    return found


@needs_checkout
def test_every_package_is_listed():
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == expected_packages()


@needs_checkout
def test_every_folder_with_python_files_is_a_package():
    for top in ("fp4kit", "cli", "kernels_cu"):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


@needs_checkout
def test_package_data_names_everything_that_is_not_python():
    data = pyproject()["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data["fp4kit"]
    assert {"**/*.cu", "**/*.cuh"} <= set(data["fp4kit.kernels_cu"])
    for folder, package in (
        ("fp4kit", "fp4kit"),
        ("cli", "fp4kit.cli"),
        ("kernels_cu", "fp4kit.kernels_cu"),
    ):
        for path in (ROOT / folder).rglob("*"):
            if path.is_dir() or "__pycache__" in path.parts or path.suffix in (".py", ".pyc"):
                continue
            assert any(path.match(pattern) for pattern in data.get(package, ())), path


@needs_checkout
def test_extras():
    extras = pyproject()["project"]["optional-dependencies"]
    own = {"calibrate", "cuda12", "cuda13", "fleet", "report"}
    assert set(extras) == own | {"browser", "dev", "docs", "peers", "test"}
    assert "fp4kit[docs,test]" in extras["dev"]
    for extra, package in (("cuda12", "cupy-cuda12x"), ("cuda13", "cupy-cuda13x")):
        assert extras[extra][0].startswith(package)


@needs_checkout
def test_classifiers_agree_with_the_rest():
    project = pyproject()["project"]
    classifiers = project["classifiers"]
    assert "Typing :: Typed" in classifiers
    # The licence is an SPDX expression (PEP 639), which excludes classifiers of licences.
    assert project["license"] == "Apache-2.0"
    assert not any(name.startswith("License ::") for name in classifiers)
    found = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", c) for c in classifiers]
    minors = [int(match[1]) for match in found if match]
    assert minors == list(range(10, 10 + len(minors)))
    assert project["requires-python"] == f">=3.{minors[0]}"


@needs_checkout
def test_urls():
    urls = pyproject()["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    for url in urls.values():
        assert url.startswith(urls["Source"])
        tree, _, path = url.partition("/blob/main/")
        assert not path or (ROOT / path).is_file(), (tree, path)


@needs_checkout
def test_links_of_the_readme_are_absolute_and_lead_to_files():
    # The README is the project's page on PyPI, where relative links lead nowhere.
    source = pyproject()["project"]["urls"]["Source"]
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text("utf-8"))
    assert links
    for link in links:
        assert link.startswith("https://"), link
        if link.startswith(source):
            path = re.fullmatch(re.escape(source) + r"/(?:blob|tree)/main/([^#]+)(?:#.*)?", link)
            assert path, link
            assert (ROOT / path[1]).exists(), link


def test_installed_data_can_be_read():
    assert importlib.resources.files("fp4kit").joinpath("py.typed").is_file()
    kernels = importlib.resources.files("fp4kit.kernels_cu")
    assert kernels.joinpath("__init__.py").is_file()
    importlib.import_module("fp4kit.cli")


def test_version_is_the_metadata_version():
    assert fp4kit.__version__ == importlib.metadata.version("fp4kit")


def test_all_lists_what_is_public():
    assert list(fp4kit.__all__) == sorted(fp4kit.__all__)
    # Names may be loaded lazily: ask for each, then look at what the package itself holds.
    values = {name: getattr(fp4kit, name) for name in fp4kit.__all__}
    assert None not in values.values()
    assert set(fp4kit.__all__) <= set(dir(fp4kit))
    own = {
        name
        for name, value in vars(fp4kit).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("fp4kit")
    }
    assert own <= set(fp4kit.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fp4kit.no_such_name


def test_public_names_are_documented():
    for name in fp4kit.__all__:
        value = getattr(fp4kit, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name
            for other, member in vars(value).items() if inspect.isclass(value) else ():
                if inspect.isfunction(member) and not other.startswith("_"):
                    assert inspect.getdoc(member), f"{name}.{other}"


def library_modules() -> list[str]:
    """Modules of the library that can be imported without optional packages."""
    names = ["fp4kit"]
    for info in pkgutil.walk_packages(fp4kit.__path__, "fp4kit."):
        optional = (
            "fp4kit.__main__",
            "fp4kit.cli",
            "fp4kit.kernels_cu",
            "fp4kit.cu",
            "fp4kit.torch",
        )
        if not info.name.startswith(optional):
            names.append(info.name)
    return names


@pytest.mark.parametrize("name", library_modules())
def test_doctests(name):
    with np.printoptions(legacy=False):
        result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("name", [name for name in fp4kit.__all__ if name.islower()])
def test_every_public_function_has_an_example_that_runs(name):
    function = getattr(fp4kit, name)
    if not inspect.isfunction(function):
        assert name == "__version__"
        return
    examples = doctest.DocTestFinder(recurse=False).find(function, name)
    assert sum(len(example.examples) for example in examples) > 0, f"{name} has no doctest"
