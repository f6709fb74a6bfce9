"""The tenants file: what it says, all that can be wrong with it, and keys."""

from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.serve.http.keys import find_tenant, hash_key, make_key
from equipoise.serve.http.tenants import Tenant, open_tenants, read_tenants

ONE, TWO = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def test_a_file_reads_as_written(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(
        f"""
        [tenants.research]
        keys = ["{ONE}", "{TWO}"]
        weight = 2
        requests_per_minute = 600
        tokens_per_minute = 100_000
        concurrency = 16
        [tenants."team.b"]
        keys = ["sha256:{"3" * 64}"]
        """
    )
    tenants = read_tenants(file)
    assert tenants.by_name["research"] == Tenant("research", 2.0, 600, 100_000, 16)
    assert tenants.by_name["team.b"] == Tenant("team.b")
    assert tenants.by_hash[ONE] is tenants.by_hash[TWO] is tenants.by_name["research"]
    assert tenants.weights == {"research": 2.0, "team.b": 1.0}
    assert not tenants.is_open
    assert open_tenants().is_open


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(
        f"""[tenants.a]
keys = ["{ONE}"]
weight = 0
wieght = 2
[tenants.b]
concurrency = 1.5
[tenants.c]
keys = ["secret"]
[tenants."d e"]
keys = ["{ONE}"]
[tenants.f]
keys = []
[tenants.g]
keys = ["{TWO}"]
[tenants.h]
keys = ["{TWO}"]
[server]
x = 1
"""
    )
    with pytest.raises(SpecError) as refused:
        read_tenants(file)
    assert str(refused.value) == "\n".join(
        f"{file}:{line}"
        for line in (
            "3  tenants.a.weight: must be at least 1e-06; it is 0.",
            "4  tenants.a.wieght: no such key. Nearest: weight",
            "5  tenants.b.keys: is missing. Every tenant needs one: equipoise serve --new-key NAME",
            "6  tenants.b.concurrency: must be a whole number, not 1.5.",
            "8  tenants.c.keys: a key is kept as its digest, sha256: and 64 hexadecimal digits. "
            "Make one: equipoise serve --new-key c",
            '9  tenants.d e: is not a tenant\'s name. Use letters, digits, ".", "_" and "-", at '
            "most 63 of them, and begin with a letter or a digit.",
            "12  tenants.f.keys: is empty. Make a key: equipoise serve --new-key NAME",
            "16  tenants.h.keys: tenant g has the same key. Make one for each: equipoise serve "
            "--new-key NAME",
            "17  server: no such key. A tenants file has tables [tenants.NAME].",
        )
    )


@pytest.mark.parametrize("text", ["", "tenants = 3", "[tenants]"])
def test_a_file_without_tenants_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "t.toml"
    file.write_text(text)
    with pytest.raises(SpecError) as refused:
        read_tenants(file)
    assert str(refused.value) == (
        f"{file}:1  tenants: there is no tenant. Write at least one table [tenants.NAME]."
    )


def test_a_key_opens_its_tenant_and_no_other_does() -> None:
    keys = [make_key() for _ in range(3)]
    assert len(set(keys)) == 3
    assert all(len(key) == 46 and key.startswith("eq-") for key in keys)
    tenants = {hash_key(key): Tenant(f"t{at}") for at, key in enumerate(keys)}
    for at, key in enumerate(keys):
        tenant = find_tenant(key, tenants)
        assert tenant is not None
        assert tenant.name == f"t{at}"
    for wrong in (keys[0][:-1], keys[0] + "a", "", hash_key(keys[0]), "\ud800"):
        assert find_tenant(wrong, tenants) is None
