"""The user's statements in a state: whole, byte for byte, in order, in any language, and bounded."""

from collections.abc import Sequence

import pytest

from policies.memory.checkpoint import Checkpoint
from policies.memory.state import MAX_SENTENCES, MAX_TOKENS, read_state
from policies.text.segments import Readings, Source, sentences
from tests.policies.sessions import shared_conversations
from tests.profile import each_once

RULES = {
    "en": "Please always send me the invoices as PDF before the fifteenth.",
    "de": "Schicken Sie mir die Rechnungen bitte immer vor dem Fünfzehnten als PDF.",
    "fr": "Envoyez-moi toujours les factures en PDF avant le quinze du mois.",
    "es": "Envíeme siempre las facturas en PDF antes del día quince.",
    "zh": "请务必在每月十五日之前以PDF格式把发票寄给我。",
    "ja": "請求書は必ず毎月十五日までにPDFで送ってください。",
    "ar": "أرسل لي الفواتير دائما بصيغة PDF قبل الخامس عشر من الشهر.",
    "ru": "Всегда присылайте мне счета в формате PDF до пятнадцатого числа.",
}


def state_of(sources: Sequence[Source], previous: Checkpoint | None = None) -> Checkpoint:
    return read_state(sources, goal="", previous=previous, readings=Readings())


def said(*texts: str) -> list[Source]:
    return [Source(n, "user", text, tokens=1 + len(text.encode()) // 4) for n, text in enumerate(texts)]


def assert_word_for_word(sources: Sequence[Source], constraints: Sequence[str]) -> None:
    """Every constraint is a whole sentence of the user, and they stand in the order in which they were said last."""
    spoken = [s for s in sources if s.role == "user" and not s.is_result]
    order = [text for source in spoken for text in sentences(source.text)]
    assert set(constraints) <= set(order)
    last = {text: n for n, text in enumerate(order)}
    places = [last[text] for text in constraints]
    assert places == sorted(places)
    for text in constraints:
        assert any(text.encode() in source.text.encode() for source in spoken)
    assert len(constraints) <= MAX_SENTENCES
    assert sum(len(text.encode()) // 4 for text in constraints) <= MAX_TOKENS


@pytest.mark.requirement("R.55", "S.22", "R.57")
@pytest.mark.parametrize("name", ["side_constraints", "longmemeval_windows", "tau_airline_long", "swe_agent"])
def test_recorded_conversations_leave_the_users_sentences_byte_for_byte(name: str) -> None:
    for sources, _ in shared_conversations(name):
        assert_word_for_word(sources, state_of(sources).constraints)


TALK = {
    "en": "Delivery {0} came today and we put it into hall {1} of the warehouse.",
    "de": "Lieferung {0} kam heute an und steht nun in Halle {1} des Lagers.",
    "fr": "La livraison {0} est arrivée ce matin et se trouve dans le hall {1}.",
    "es": "La entrega {0} llegó hoy y la dejamos en la nave {1} del almacén.",
    "zh": "第{0}批货物今天到了，我们把它放在仓库的{1}号大厅里。",  # noqa: RUF001
    "ja": "配送{0}は今日届いたので、倉庫の{1}番ホールに置きました。",
    "ar": "وصلت الشحنة {0} اليوم ووضعناها في القاعة {1} من المستودع.",
    "ru": "Партия {0} пришла сегодня, и мы поставили её в зал {1} склада.",
}


@each_once
@pytest.mark.requirement("R.57", "A4.10")
@pytest.mark.parametrize("language", RULES)
@pytest.mark.parametrize("around", TALK)
def test_a_rule_given_once_stands_in_the_state_in_every_language(language: str, around: str) -> None:
    """The rule stands alone among far more than there is room for, wholly in its own language or in another one."""
    number = 120
    talk = [TALK[around].format(n, n % 11) for n in range(number)]
    for place in (1, number // 2, number):
        made = state_of(said(*talk[:place], RULES[language], *talk[place:])).constraints
        assert RULES[language] in made
        assert len(made) < number


@pytest.mark.requirement("R.57")
def test_a_revised_rule_stands_before_its_revision_and_nothing_is_masked() -> None:
    texts = ("Plan the launch.", "From now on, answer in German.", "Actually, answer in French from now on.")
    state: Checkpoint | None = None
    for _ in range(10):
        state = Checkpoint.from_json(state_of(said(*texts), previous=state).to_json())
        assert state.constraints == texts


@pytest.mark.requirement("A0.108")
def test_a_state_that_another_conversation_goes_on_from_keeps_its_statements_first() -> None:
    first = state_of(said("Plan the launch.", RULES["zh"], RULES["ar"]))
    second = state_of(said("Weiter geht es mit dem Plakat.", RULES["ru"]), previous=first)
    assert second.goal == "Plan the launch."
    assert second.constraints == (*first.constraints, "Weiter geht es mit dem Plakat.", RULES["ru"])
