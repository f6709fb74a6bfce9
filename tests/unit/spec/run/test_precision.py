"""Float8 products are refused beside whatever they are not proven with."""

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.run.load import read_run

FP8 = ("train.precision", "fp8")
SAID = 'train.precision = "fp8" (--train.precision) is proven'
ALONE = f"{SAID} with layout.dp, layout.cp and layout.zero alone"

REFUSED = [
    *(
        (
            {f"layout.{axis}": "2"},
            f"--layout.{axis}: 2 is given, but {ALONE}. Set layout.{axis} = 1, or "
            f'train.precision = "bf16".',
        )
        for axis in ("tp", "pp", "ep", "etp")
    ),
    (
        {"lora.rank": "4", "model.init": "hf:nowhere"},
        f"--lora.rank: 4 trains adapters, but {SAID} where the weights themselves are trained. "
        f'Set lora.rank = 0, or train.precision = "bf16".',
    ),
    (
        {"model.engine": "transformers", "model.init": "hf:nowhere"},
        f'--model.engine: "transformers" is given, but {SAID} in this package\'s own decoders. '
        f'Set train.precision = "bf16".',
    ),
    (
        {"model.preset": "moe-3m"},
        '--train.precision: "fp8" is proven in dense models, but this one has 8 experts a layer. '
        'Set "bf16".',
    ),
    (
        {"model.ffn": "40"},
        '--train.precision: "fp8" multiplies weights whose sides divide by 16, but model.ffn = '
        '40. Set "bf16".',
    ),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=[" ".join(g) for g, _ in REFUSED])
def test_what_is_not_proven_is_refused(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_run(None, [FP8, *given.items()])
    assert sentence in str(caught.value).splitlines()


@pytest.mark.parametrize("given", [{"layout.dp": "4"}, {"layout.cp": "2"}, {"layout.zero": "3"}])
def test_what_is_proven_is_taken(given: dict[str, str]) -> None:
    assert read_run(None, [FP8, *given.items()]).spec.train.precision == "fp8"
