import pytest

from policies.summary.identifiers import invented

MATERIAL = """\
[user] Move the shop to /srv/shop/app.py on db-7.internal:5432 before 2024-05-17, at most $1,200, and use UTF-8.
[assistant] I open the page of order W7731 at 15:30 with get_order("W7731").
[result of run] {"path": "src/app/main.py", "sha": "a1b2c3d4e5f60718293a4b5c6d7e8f9012345678", "size": 1048576}
[result of run] {"out": "line one\\nE4411 carrier refused the manifest\\nparse_args(x)"}
[result of run] cd src/app && pytest tests/test_main.py: ValueError: bad port 99999
[result of run] https://shop.example.org/orders/7731/ took 1.5 s
"""


@pytest.mark.requirement("A0.58", "R.55")
@pytest.mark.parametrize(
    "said",
    [
        "The file is /srv/shop/app.py.",
        "Budget 1200 dollars, $1,200.00 in all.",
        "Due on 5/17/2024, which is 17.5.2024.",
        "At 15:30 the order w7731 was opened.",
        "Commit a1b2c3d4 is on it.",
        "Use utf8 as the encoding; that is UTF-8.",
        "Call parse_args() and get_order.",
        "E4411 was reported.",
        "Run src/app/tests/test_main.py for the ValueError.",
        "See shop.example.org/orders/7731 and http://shop.example.org/orders/7731.",
        "Three files and/or rows, step 2 of 4.",
        "1,048,576 bytes",
    ],
)
def test_what_is_there_in_another_spelling_is_not_invented(said: str) -> None:
    assert invented(said, MATERIAL) == ()


@pytest.mark.requirement("A0.58", "R.55")
@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("The order is W7732.", ("W7732",)),
        ("See /srv/shop/other.py.", ("srv/shop/other.py",)),
        (
            'See `/srv/shop/other.py` and "order W7732".',
            ("/srv/shop/other.py", "order W7732", "srv/shop/other.py", "W7732"),
        ),
        ("It was W773.", ("W773",)),
        ("On 2024-05-18 at $1,300.", ("2024-05-18", "1300")),
        ("Port 5433 was tried.", ("5433",)),
        ("A KeyError came from load_rows().", ("KeyError", "load_rows")),
        ("Commit a1b2c3d5 is on it.", ("a1b2c3d5",)),
        ("Mail ops@shop.example.org.", ("ops@shop.example.org",)),
        ("See https://evil.example/x.", ("https://evil.example/x",)),
        ("The order was read by Baumann and GitHub.", ("Baumann", "GitHub")),
    ],
)
def test_what_is_not_there_is_invented(said: str, wrong: tuple[str, ...]) -> None:
    assert invented(said, MATERIAL) == wrong
