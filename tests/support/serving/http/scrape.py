"""What /metrics says, read by Prometheus' own parser."""

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from support.serving.http.raw import ask
from support.serving.http.served import Running

_LABELS = ("tenant", "finished_reason", "reason", "variant", "le")


def scraped(
    server: Running, headers: Mapping[str, str] | None = None
) -> dict[tuple[str, str], float]:
    """Values by name and by the one label that is not the model."""
    text = ask(server.port, "GET", "/metrics", headers=headers).body.decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = next((sample.labels[each] for each in _LABELS if each in sample.labels), "")
            values[sample.name, label] = sample.value
    return values
