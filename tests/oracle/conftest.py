"""transformers without network, bars or opinions on threads."""

import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TQDM_DISABLE"] = "1"

with warnings.catch_warnings():
    # Only while it is imported: what its dependencies deprecate is not ours to mend.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    import transformers

import pytest
import torch

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
