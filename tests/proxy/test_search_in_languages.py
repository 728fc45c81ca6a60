"""The archive's full-text search finds a text by words of its own language, on SQLite and on PostgreSQL."""

# ruff: noqa: RUF001
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.store import Store
from tests.policies.tongues import TONGUES
from tests.proxy.test_recall import remove

OTHERS = {
    "ru": ("Пароль от домика у озера: Цапля77.", "пароль домика"),
    "th": ("รหัสผ่านไวไฟของกระท่อมคือนกกระสา77", "รหัสผ่านไวไฟ"),
    "ko": ("오두막의 와이파이 비밀번호는 왜가리77입니다.", "비밀번호"),
    "hi": ("झोपड़ी का पासवर्ड बगुला77 है।", "पासवर्ड"),
    "he": ("הסיסמה של הבקתה היא אנפה77.", "הסיסמה הבקתה"),
    "fu": ("\uff37\uff49\uff46\uff49 is \uff12\uff13\uff14\uff10", "wifi 2340"),
}


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite+aiosqlite:///{tmp_path}/w.db"


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = await Store.open(url)
    yield opened
    await opened.close()


@pytest.mark.requirement("A4.25")
async def test_a_question_finds_what_was_said_in_its_language(store: Store) -> None:
    cases = [(said, asked) for each in TONGUES.values() for said, asked, _ in each.facts] + list(OTHERS.values())
    chat = [text for each in TONGUES.values() for pair in each.chat for text in pair]
    await remove(store, "c", *chat, *(said for said, _ in cases))
    for said, asked in cases:
        assert said in [o.text for o in await store.search("t", asked, limit=3, conversation="c")], asked


@pytest.mark.requirement("A4.25")
async def test_all_words_of_a_query_stand_before_any_of_them_and_a_path_is_one(store: Store) -> None:
    await remove(
        store, "c", "src/api/client.py was read", "client api of the src folder", "小木屋的密码", "小木屋很漂亮"
    )
    assert [o.text for o in await store.search("t", "src/api/client.py")] == ["src/api/client.py was read"]
    assert [o.text for o in await store.search("t", "小木屋 密码")] == ["小木屋的密码"]
    assert len(await store.search("t", "小木屋 城市")) == 2
