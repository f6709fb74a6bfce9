"""What encoders of images and sound are proven beside, checked before a run begins.

Why
    A layout, a model or a policy that nobody has proven with images might train something else
    without a word.

Kept true (tests/unit/spec/modality/test_judge.py)
    The whole text of each refusal.
"""

from equipoise.spec.catalog import POLICIES
from equipoise.spec.run.keys import toml
from equipoise.spec.run.wish import Wish, nearest_multiples

PARTS = "parts"
_SECTIONS = ("vision", "audio")


def judge_modality(wish: Wish) -> None:
    """Refuse encoders where they are not proven, and rows with parts where there is none.

    Args:
        wish: Values of all keys; faults are added to it.
    """
    if not wish.is_sound("vision.layers", "audio.layers", "data.format", "data.mix"):
        return
    given = [each for each in _SECTIONS if wish[f"{each}.layers"]]
    if not given:
        if wish["data.format"] == PARTS:
            wish.tell(
                "data.format",
                '"parts" reads images and sound, and the run has no encoder for them. Set '
                "vision.layers or audio.layers.",
            )
        return
    for section in given:
        _judge_sizes(wish, section)
    said = wish.cite(f"{given[0]}.layers")
    _judge_data(wish, said, f"{given[0]}.layers")
    _judge_beside(wish, said)


def _judge_sizes(wish: Wish, section: str) -> None:
    """Sizes of an encoder that do not match."""
    hidden, heads = wish[f"{section}.hidden"], wish[f"{section}.heads"]
    if wish.is_sound(f"{section}.hidden", f"{section}.heads") and hidden % (4 * heads):
        at = "hidden" if wish.is_given(f"{section}.hidden") else "heads"
        wish.tell(
            f"{section}.{at}",
            f"a width of {hidden} does not divide into {heads} heads of a width that is a multiple "
            f"of 4, which rotary positions of two axes need. Set {section}.hidden to "
            f"{nearest_multiples(hidden, 4 * heads)}.",
        )
    if section == "vision" and wish.is_sound("vision.least_tokens", "vision.most_tokens"):
        least, most = wish["vision.least_tokens"], wish["vision.most_tokens"]
        if least > most:
            wish.tell(
                "vision.least_tokens",
                f"{least} is more than {wish.cite('vision.most_tokens')}. Give at most {most}.",
            )


def _judge_data(wish: Wish, said: str, key: str) -> None:
    """A corpus that has no images or sound, or mixes them with others."""
    if wish["data.mix"]:
        wish.tell(
            "data.mix",
            f"sources are mixed, but {said} is proven with one. Put all rows into data.path.",
        )
    elif wish["data.format"] != PARTS:
        wish.tell(
            key,
            f"{wish[key]} encodes images or sound, but {wish.cite('data.format')}. Set "
            f'data.format = "parts", or {key} = 0.',
        )
    elif wish.is_sound("data.source") and wish["data.source"] != "jsonl":
        wish.tell(
            "data.source",
            f"{toml(wish['data.source'])} has no rows with parts. Set data.source = "
            '"jsonl", whose rows name files.',
        )


def _judge_beside(wish: Wish, said: str) -> None:
    """What else of a run is not proven beside encoders."""
    if wish["model.engine"] == "transformers":
        wish.tell(
            "model.engine",
            f'"transformers" is given, but {said} is proven beside this package\'s own decoders. '
            'Set model.engine = "equipoise".',
        )
    if wish.is_sound("experts.policy") and wish["experts.policy"] == "speculative":
        wish.tell(
            "experts.policy",
            f'"speculative" places tokens by their words, but {said} is proven with tokens in the '
            'order of their documents. Set experts.policy = "fixed" or "exact".',
        )
    if wish.is_sound("experts.memory_mib") and wish["experts.memory_mib"]:
        wish.tell(
            "experts.memory_mib",
            f"{wish['experts.memory_mib']:g} keeps experts in a file, but {said} is proven with "
            "experts in memory. Set experts.memory_mib = 0.",
        )
    if wish["lora.rank"]:
        wish.tell(
            "lora.rank",
            f"{wish['lora.rank']} trains adapters, but {said} is proven where the weights "
            "themselves are trained. Set lora.rank = 0.",
        )
    if wish.is_sound("train.precision") and wish["train.precision"] == "fp8":
        wish.tell("train.precision", f'"fp8" is given, but {said} is proven in fp32 and bf16.')
    policy = wish["pack.policy"]
    if wish.is_sound("pack.policy") and POLICIES[policy].divides:
        wish.tell(
            "pack.policy",
            f"{toml(policy)} divides documents, but {said} is proven with policies that leave "
            'them whole. Set pack.policy = "by-work".',
        )
