"""Templates that would never end, or fill the memory, are refused."""

import pytest

from equipoise.data.chat.template import ChatTemplate, RenderError

ENDLESS = {
    "{{ 'ab' * 10000000000 }}": "OverflowError: a text is repeated 10,000,000,000 times",
    "{{ 10000000000 * messages }}": "OverflowError: a text is repeated 10,000,000,000 times",
    "{{ 2 ** (9 ** 9) }}": "OverflowError: a power has the exponent 387420489",
    "{% for i in range(1000000000) %}x{% endfor %}": "OverflowError: Range too big. The sandbox "
    "blocks ranges larger than MAX_RANGE (100000)",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: maximum recursion depth "
    "exceeded",
}


@pytest.mark.parametrize("source", ENDLESS)
def test_what_would_never_end_is_refused(source: str) -> None:
    with pytest.raises(RenderError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])
    assert str(caught.value).startswith(f"the chat template fails on it: {ENDLESS[source]}")


def test_small_products_are_as_ever() -> None:
    template = ChatTemplate("{{ '=' * 3 }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 2 ** 0.5 < 2 }}", {})
    assert template.render([{"role": "user", "content": "a"}]) == "===61024True"
