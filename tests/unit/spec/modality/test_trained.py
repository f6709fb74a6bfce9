"""What plans and forecasts know of the weights that a run freezes."""

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.modality.trained import every_name, run_shares
from equipoise.spec.run.load import read_run

GIVEN = {
    "vision.layers": "1",
    "data.source": "jsonl",
    "data.path": "rows.jsonl",
    "data.format": "parts",
}


@pytest.mark.parametrize(
    ("freeze", "first_back"),
    [
        ("[]", None),
        ('["encoders.image.layers"]', None),
        ('["embed", "layers.0"]', 0),  # the encoder is trained, before all layers
        ('["embed", "layers.0", "encoders"]', 1),
        ('["layers.0", "encoders"]', 0),
    ],
)
def test_a_decoder_is_known_by_what_a_run_freezes_of_it(
    freeze: str, first_back: int | None
) -> None:
    run = read_run(None, list((GIVEN | {"train.freeze": freeze}).items()))
    shares = run_shares(run.spec, run.model)
    assert (None if shares is None else shares.first_back) == first_back


def test_a_plan_refuses_what_training_would() -> None:
    run = read_run(None, list((GIVEN | {"train.freeze": '["encoders.image.layer"]'}).items()))
    with pytest.raises(SpecError) as caught:
        run_shares(run.spec, run.model)
    assert str(caught.value) == (
        'train.freeze: "encoders.image.layer" matches none of the model\'s '
        f'{len(every_name(run.spec, run.model))} weights. Nearest: "encoders.image.layers".'
    )
