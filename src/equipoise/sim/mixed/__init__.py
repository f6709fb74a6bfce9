"""Steps whose layers or stages differ: on strategies of their own, on devices of several kinds."""
