"""Templates that would never end, or fill the memory, are refused."""

import threading

import pytest

from equipoise.data.chat.template import ChatTemplate, RenderError

LOOP = "{% for i in range(99999) %}"
ROUNDS = "runs its loops more than 1,048,576 times"
JOINED = "joins texts to more than 67,125,248 characters"
ENDLESS = {
    "{{ 'ab' * 10000000000 }}": "repeats a text 10,000,000,000 times",
    "{{ 10000000000 * messages }}": "repeats a text 10,000,000,000 times",
    "{{ 2 ** (9 ** 9) }}": "has a power with the exponent 387420489",
    "{% for i in range(1000000000) %}x{% endfor %}": "counts to 1,000,000,000",
    LOOP * 2 + "{% endfor %}" * 2: ROUNDS,
    LOOP + "{% for i in range(99999) if false %}" + "{% endfor %}" * 2: ROUNDS,
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "calls itself without end",
    LOOP + "x" * 100 + "{% endfor %}": "writes more than 1,048,576 characters of its own",
    "{% set ns = namespace(s='') %}" + LOOP + "{% set ns.s = ns.s ~ 'ab' %}{% endfor %}": JOINED,
    "{% set ns = namespace(s='') %}" + LOOP + "{% set ns.s = ns.s + 'ab' %}{% endfor %}": JOINED,
    "x" * 2_000_000: "writes more than 1,048,576 characters of its own",
}


@pytest.mark.parametrize("source", ENDLESS, ids=range(len(ENDLESS)))
def test_what_would_never_end_is_refused(source: str) -> None:
    with pytest.raises(RenderError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])
    assert str(caught.value) == f"the chat template {ENDLESS[source]}"


def test_a_bound_holds_for_each_conversation_anew() -> None:
    template = ChatTemplate(LOOP + "{% endfor %}{{ messages[0].content }}", {})
    for _ in range(12):
        assert template.render([{"role": "user", "content": "a"}]) == "a"


def test_marks_are_found_in_a_text_of_many_blocks() -> None:
    source = LOOP + "-{% generation %}ab{% endgeneration %}{% endfor %}"
    text, spans = ChatTemplate(source, {}).render_marked([{"role": "user", "content": "a"}])
    assert text == "-ab" * 99_999
    assert spans == [(at, at + 2) for at in range(1, 3 * 99_999, 3)]


class Beside:
    """A text in whose middle another thread writes another conversation by the same template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template, self.written = template, list[tuple[str, list[tuple[int, int]]]]()

    def __str__(self) -> str:
        def write() -> None:
            self.written.append(self.template.render_marked([{"role": "user", "content": "b"}]))

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        return "a"


def test_two_threads_write_by_one_template() -> None:
    source = "{% for each in messages %}{% generation %}{{ each.content }}{% endgeneration %}!"
    template = ChatTemplate(source + "{% endfor %}", {})
    beside = Beside(template)
    talk = [{"role": "user", "content": each} for each in (beside, "c")]
    assert template.render_marked(talk) == ("a!c!", [(0, 1), (2, 3)])
    assert beside.written == [("b!", [(0, 1)])]


def test_a_long_conversation_may_be_joined_many_times() -> None:
    text = "word " * 100_000
    source = "{{ '<' + messages[0].role ~ messages[0].content + '>' ~ 1 ~ missing ~ none }}"
    written = ChatTemplate(source, {}).render([{"role": "user", "content": text}])
    assert written == f"<user{text}>1None"


def test_a_long_conversation_is_written_whole() -> None:
    text = "word " * 400_000
    template = ChatTemplate("{% for each in messages %}{{ each.content }}{% endfor %}", {})
    assert template.render([{"role": "user", "content": text}]) == text


def test_a_fault_of_a_template_is_said_without_the_name_of_its_class() -> None:
    with pytest.raises(RenderError) as caught:
        ChatTemplate("{{ messages + 1 }}", {}).render([{"role": "user", "content": "a"}])
    assert str(caught.value) == (
        'the chat template fails on it: can only concatenate list (not "int") to list'
    )


def test_small_products_are_as_ever() -> None:
    template = ChatTemplate("{{ '=' * 3 }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 2 ** 0.5 < 2 }}", {})
    assert template.render([{"role": "user", "content": "a"}]) == "===61024True"
