"""Keys of tenants: made here, kept as digests, compared in constant time.

What it decides
    A key is 256 random bits, so nobody can guess it from its digest: one SHA-256 is enough, where
    a password, which people choose, would need scrypt. A slow hash would let strangers stall the
    server by sending wrong keys. Every digest is compared, whether one has matched or not, so
    that time says nothing about which tenant, or how much of a key, was right.

Kept true (tests/unit/serve/http/test_tenants.py)
    The right key and no other opens; the file never holds a key.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import TypeVar

PREFIX = "eq-"
HASH = re.compile(r"sha256:[0-9a-f]{64}")
_Tenant = TypeVar("_Tenant")


def make_key() -> str:
    """A new key, 43 characters after the prefix."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What the tenants file keeps of a key."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def find_tenant(key: str, tenants: Mapping[str, _Tenant]) -> _Tenant | None:
    """The tenant whose digest is the key's; None if there is none."""
    digest, matching = hash_key(key), None
    for each, tenant in tenants.items():
        if hmac.compare_digest(each, digest):
            matching = tenant
    return matching
