"""Collects the figures of the comparison and, with --write, makes them the table of docs/parity.md."""

from pathlib import Path

import pytest

from . import libraries

_ROWS: list[tuple] = []
_BEGIN, _END = "<!-- table: written by `make parity` -->", "<!-- end of table -->"


def pytest_addoption(parser):
    parser.addoption("--write", action="store_true", help="write the table into docs/parity.md")


@pytest.fixture
def record_parity():
    return lambda *row: _ROWS.append(row)


def pytest_sessionfinish(session, exitstatus):
    if not session.config.getoption("--write") or not _ROWS:
        return
    lines = [
        "| library | its function | ours | batches | largest relative difference: value | gradient |",
        "|---|---|---|---|---|---|",
    ]
    for library, function, name, options, batches, value, gradient in _ROWS:
        call = ", ".join(f"{k}={v!r}" for k, v in options.items())
        lines.append(
            f"| {library} {libraries.version(library)} | {function} | `{name}({call})` | {batches} "
            f"| {value:.1e} | {gradient:.1e} |"
        )
    page = Path(__file__).parents[1] / "docs" / "parity.md"
    text = page.read_text()
    before, after = text.partition(_BEGIN)[0], text.partition(_END)[2]
    page.write_text(before + _BEGIN + "\n" + "\n".join(lines) + "\n" + _END + after)
