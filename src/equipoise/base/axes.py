"""The names of mesh axes and the legend of tensor shapes.

An *axis* is a mesh axis (dp, cp, tp, pp, ep). A *dim* is a tensor dimension.

Shape letters, as suffixes of tensor names (``q_THE``); lower case is this rank's share:

====== =====================
T      packed tokens (queries)
S      keys
D      model width
H      query heads
G      key/value heads
E      head width
F      hidden width of the feed-forward
V      vocabulary
X      experts
====== =====================
"""

DATA_AXIS = "dp"
REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"
TENSOR_AXIS = "tp"
EXPERT_AXIS = "ep"
EXPERT_TENSOR_AXIS = "etp"
