"""Nodes that do not start because TLS or access files cannot be right, and nodes that warn."""

import json

import pytest
from support.nodes import BIN, run
from support.pki import Pki, token_entry, write_access

ROUTER = [{"identity": "cn:router", "roles": ["router"]}]


class Desk:
    """Good files, of which each case spoils one."""

    def __init__(self, folder):
        self.folder, self.pki = folder, Pki(folder)
        self.cert, self.key = self.pki.issue("node")
        self.access = write_access(folder / "access.json", certificates=ROUTER)

    def flags(self, **changed) -> list[str]:
        """Returns the flags of a node; None leaves one out."""
        given = {"tls-cert": self.cert, "tls-key": self.key, "tls-ca": self.pki.ca,
                 "access-file": self.access} | {k.replace("_", "-"): v for k, v in changed.items()}
        return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]

    def file(self, text: str):
        path = self.folder / "spoilt"
        path.write_text(text)
        return path

    def rules(self, **content):
        return self.flags(access_file=self.file(json.dumps(content)))


def locked_key(desk: Desk):
    path = desk.folder / "locked.key"
    run("openssl", "ec", "-in", desk.key, "-out", path, "-aes256", "-passout", "pass:secret")
    return path


CASES = {
    "a certificate without its key": (lambda d: d.flags(tls_key=None), "tls_cert and tls_key go together"),
    "a key without its certificate": (lambda d: d.flags(tls_cert=None), "tls_cert and tls_key go together"),
    "an authority alone": (lambda d: ["--tls-ca", str(d.pki.ca)], "tls_ca needs tls_cert and tls_key"),
    "no access file": (lambda d: d.flags(access_file=None), "access_file is required with tls_cert"),
    "a certificate that is not there": (lambda d: d.flags(tls_cert="/no/such.pem"), "tls_cert: /no/such.pem cannot be read"),
    "a certificate that is none": (lambda d: d.flags(tls_cert=d.file("x")), "has no certificate in PEM"),
    "an authority that is none": (lambda d: d.flags(tls_ca=d.file("x")), "tls_ca: "),
    "a key that is none": (lambda d: d.flags(tls_key=d.file("x")), "has no private key in PEM"),
    "a key with a passphrase": (lambda d: d.flags(tls_key=locked_key(d)), "without a passphrase"),
    "another certificate's key": (lambda d: d.flags(tls_key=d.pki.issue("other")[1]), "is not the key of the certificate"),
    "an expired certificate": (lambda d: d.flags(**dict(zip(("tls_cert", "tls_key"), d.pki.issue(
        "old", days=("20200101000000Z", "20200201000000Z"))))), "has a certificate that has expired"),
    "a certificate of later": (lambda d: d.flags(**dict(zip(("tls_cert", "tls_key"), d.pki.issue(
        "new", days=("20990101000000Z", "20990201000000Z"))))), "is not valid yet"),
    "an access file that is not there": (lambda d: d.flags(access_file="/no/such.json"), "/no/such.json"),
    "an access file that is a folder": (lambda d: d.flags(access_file="/tmp"), "/tmp"),
    "an access file that is no JSON": (lambda d: d.flags(access_file=d.file("{")), "spoilt"),
    "an unknown key": (lambda d: d.rules(certificate=[]), "did you mean certificates"),
    "an unknown role": (lambda d: d.rules(certificates=[{"identity": "cn:x", "roles": ["king"]}]), "a role is one of prefill"),
    "an identity of no kind": (lambda d: d.rules(certificates=[{"identity": "x", "roles": ["router"]}]), "expected cn:, dns:"),
    "a tenant with a slash": (lambda d: d.rules(certificates=[ROUTER[0] | {"tenant": "a/b"}]), "no slash"),
    "a token in the clear": (lambda d: d.rules(tokens=[{"name": "a", "token": "very-secret", "roles": ["router"]}]),
                             "a token itself does not belong here"),
    "a token twice": (lambda d: d.rules(tokens=[token_entry("a", "t", "router"), token_entry("b", "t", "operator")]),
                      "tokens[1].sha256: is the hash of a token before it"),
    "a quota of nothing": (lambda d: d.rules(tenants={"a": {"sequences": 0}}), "expected a whole number above 0"),
    "a quota of no unit": (lambda d: d.rules(tenants={"a": {"dram_bytes": "4 parsecs"}}), "expected a count of bytes"),
    "a key twice": (lambda d: d.flags(access_file=d.file('{"tokens": [], "tokens": []}')), "tokens"),
    "callers without TLS": (lambda d: ["--access-file", str(d.access)], "would protect nothing"),
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return Desk(tmp_path_factory.mktemp("desk"))


@pytest.mark.parametrize("case", CASES)
def test_a_node_does_not_start_with(desk, case):
    flags, words = CASES[case]
    for program in ("sluice-server", "sluice-prefill"):
        done = run(BIN / program, "--model", "nowhere", "--listen", "127.0.0.1:0", *flags(desk))
        assert done.returncode == 1
        assert words in done.stderr, done.stderr
        assert "very-secret" not in done.stderr + done.stdout and "PRIVATE" not in done.stderr + done.stdout


@pytest.mark.parametrize("listen, warned", [("127.0.0.1:0", 0), ("[::1]:0", 0), ("0.0.0.0:0", 1)])
def test_a_node_that_others_reach_without_tls_says_so_once(listen, warned):
    done = run(BIN / "sluice-server", "--model", "nowhere", "--listen", listen, "--admin-listen", "127.0.0.1:0",
               "--log-level", "warn")
    assert (done.stdout + done.stderr).count("NO TLS") == warned


def test_the_configuration_shows_paths_alone(desk):
    done = run(BIN / "sluice-server", "--model", "nowhere", *desk.flags(), "--check-config")
    assert done.returncode == 0 and str(desk.key) in done.stdout
    assert "BEGIN" not in done.stdout and "cn:router" not in done.stdout
