"""A small model as a run would have it, and what its iterations take."""

from pathlib import Path

from equipoise.nn.hf.files import GENERATION, ModelFiles, as_json, tokenizer_files
from equipoise.serve.source import TrainedModel
from equipoise.spec.device.serving import ServingCurve
from support.serving.engine import END, SMALL, byte_level, small_decoder

CURVE = ServingCurve(((1, 1e-3), (512, 5e-3)), ((1, 1e-4),), 1e-8, 1e-8, 1e-5, 1e-8)


def trained() -> TrainedModel:
    contents = tokenizer_files(byte_level().to_str().encode(), {})
    contents = {**contents, GENERATION: as_json({"eos_token_id": END, "bos_token_id": END})}
    state, files = dict(small_decoder().state_dict()), ModelFiles(contents, "small")
    return TrainedModel(Path("small"), SMALL, state, files, context_tokens=200)
