"""What float8 products are proven beside, checked before a run begins.

Why
    A layout or a model that nobody has proven with float8 products might train something else
    without a word. ``bf16`` runs all of them.

Kept true (tests/unit/spec/run/test_precision.py)
    Every refusal names the key that is in the way.
"""

from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.keys import toml
from equipoise.spec.run.wish import Wish

_MULTIPLE = 16
"""Both sides of a weight must divide by it, for the kernels of devices."""


def judge_precision(wish: Wish, model: ModelSpec) -> None:
    """Refuse float8 products where they are not proven, or have no kernel.

    Args:
        wish: Values of all keys; faults are added to it.
        model: The run's.
    """
    if not wish.is_sound("train.precision") or wish["train.precision"] != "fp8":
        return
    said = f"{wish.cite('train.precision')} is proven"
    if wish["model.engine"] == "transformers":
        wish.tell(
            "model.engine",
            f'"transformers" is given, but {said} in this package\'s own decoders. Set '
            f'train.precision = "bf16".',
        )
        return
    for axis in ("tp", "pp", "ep", "etp"):
        if wish.is_sound(f"layout.{axis}") and wish[f"layout.{axis}"] not in (1, "cores"):
            wish.tell(
                f"layout.{axis}",
                f"{toml(wish[f'layout.{axis}'])} is given, but {said} with layout.dp, layout.cp "
                f'and layout.zero alone. Set layout.{axis} = 1, or train.precision = "bf16".',
            )
            return
    if wish["lora.rank"]:
        wish.tell(
            "lora.rank",
            f"{wish['lora.rank']} trains adapters, but {said} where the weights themselves are "
            f'trained. Set lora.rank = 0, or train.precision = "bf16".',
        )
    if model.experts:
        wish.tell(
            "train.precision",
            f'"fp8" is proven in dense models, but this one has {model.experts} experts a layer. '
            f'Set "bf16".',
        )
        return
    sides = {
        "model.hidden": model.hidden,
        "model.ffn": model.ffn,
        "model.heads x model.head_width": model.heads * model.head_width,
        "model.kv_heads x model.head_width": model.kv_heads * model.head_width,
    }
    for name, size in sides.items():
        if size % _MULTIPLE:
            wish.tell(
                "train.precision",
                f'"fp8" multiplies weights whose sides divide by {_MULTIPLE}, but {name} = '
                f'{size:,}. Set "bf16".',
            )
            return
