"""What is printed of an address."""

import pytest

from trellis.engine.text import masked_url


@pytest.mark.parametrize(
    "url, shown",
    [
        ("postgresql://ada:geheim@db:5432/t", "postgresql://ada:***@db:5432/t"),
        ("postgresql://ada:ge@heim@db/t", "postgresql://ada:***@db/t"),
        ("postgresql://ada:ge/heim@db/t", "postgresql://ada:***@db/t"),
        ("postgresql://ada:ge?heim=1@db/t", "postgresql://ada:***@db/t"),
        ("postgresql://db:5432/t?user=ada&password=ge@heim", "postgresql://db:5432/t?user=ada&password=***"),
        ("postgresql://ada@db:5432/t?password=ge@heim", "postgresql://ada@db:5432/t?password=***"),
        ("postgresql://ada:geheim@db/t?application_name=a@b", "postgresql://ada:***@db/t?application_name=a@b"),
        ("sqlite:////srv/a@b/trellis.db", "sqlite:////srv/a@b/trellis.db"),
    ],
)
def test_an_address_is_shown_without_any_piece_of_its_password(url: str, shown: str):
    assert masked_url(url) == shown
