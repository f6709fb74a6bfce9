"""The former name of ``balance.context.plan``, for one release."""

import warnings

from equipoise.balance.context.plan import ContextPlan as ContextPlan
from equipoise.balance.context.plan import ContextShares as ContextShares
from equipoise.balance.context.plan import plan_context as plan_context
from equipoise.balance.context.plan import plan_pieces as plan_pieces
from equipoise.balance.context.plan import share_tokens as share_tokens

warnings.warn(
    "equipoise.parallel.context.plan has moved. Import from equipoise.balance.context.plan.",
    DeprecationWarning,
    stacklevel=2,
)
