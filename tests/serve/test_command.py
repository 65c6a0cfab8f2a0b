"""What the server's command line refuses before it loads anything."""

from __future__ import annotations

import pytest

from jhybrid.serve.__main__ import parse_args


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--port", "65536", "expected a port from 0 to 65535, got '65536'"),
        ("--port", "-1", "expected a port from 0 to 65535, got '-1'"),
        ("--port", "http", "expected a port from 0 to 65535, got 'http'"),
        ("--api-key", "", "expected a key, got ''"),
    ],
)
def test_a_bad_value_names_its_flag(
    flag: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args([f"{flag}={value}"])
    assert f"argument {flag}: {expected}" in capsys.readouterr().err


def test_good_values_are_kept() -> None:
    args = parse_args(["--port", "0", "--api-key", "secret"])
    assert (args.port, args.api_key) == (0, "secret")
