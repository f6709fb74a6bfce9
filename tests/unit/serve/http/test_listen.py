"""Addresses that cannot be listened at: one sentence, and no traceback."""

import pytest

from equipoise.base.errors import SpecError
from equipoise.serve.http.app import make_app
from equipoise.serve.http.server import Server, listen
from equipoise.serve.http.server_state import ServerState
from equipoise.serve.http.tenants import open_tenants
from support.serving.http.served import served_model


def test_a_host_that_nobody_can_have_is_refused() -> None:
    with pytest.raises(SpecError) as refused:
        listen("é..b", 0)
    assert str(refused.value) == (
        "Cannot listen on é..b:0: no such host. Give another --port (0 takes any free one) or "
        "--host."
    )


def test_of_two_servers_that_start_at_one_address_the_second_says_so() -> None:
    first = listen("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = listen("127.0.0.1", port)  # neither listens yet, so the kernel lets both have it
    first.listen()
    state = ServerState(served_model(), open_tenants())
    with first, second, pytest.raises(SpecError) as refused:
        Server(make_app(state), state).run([second])
    assert str(refused.value) == (
        f"Cannot listen on 127.0.0.1:{port}: address already in use. Give another --port (0 takes "
        "any free one) or --host."
    )
