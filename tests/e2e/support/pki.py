"""Certificates and tokens for tests, made with the openssl program, and an access file."""

import hashlib
import json
import subprocess
from pathlib import Path

from sluice_client.rpc import Credentials

ROLES = ("prefill", "decode", "router", "operator", "monitor")


class Pki:
    """A certificate authority in a folder, and the certificates that it has issued."""

    def __init__(self, folder: Path, name: str = "ca"):
        self.folder, self.name = folder, name
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl("req", "-x509", *_NEW_KEY, self._key, "-subj", f"/CN={name}", "-days", "30", "-out", self.ca)

    def issue(self, name: str, *, uri: str = "", days: tuple[str, str] | None = None,
              under: str = "") -> tuple[Path, Path]:
        """Returns (certificate, key) of CN=name, valid for 127.0.0.1 on both ends.

        `days` are the begin and end as openssl writes times, if not today and 30 days on. `under` is the name of the
        files.
        """
        stem = under or name
        cert, key, request = (self.folder / f"{stem}.{end}" for end in ("pem", "key", "csr"))
        names = "IP:127.0.0.1,DNS:localhost" + (f",URI:{uri}" if uri else "")
        _openssl("req", *_NEW_KEY, key, "-subj", f"/CN={name}", "-out", request)
        extensions = self.folder / f"{stem}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        if days is None:
            _openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial",
                     "-days", "30", "-extfile", extensions, "-out", cert)
        else:
            # Only `openssl ca` can set a begin and an end.
            database = self.folder / f"{stem}.db"
            database.write_text("")
            config = self.folder / f"{stem}.cnf"
            config.write_text(f"[ca]\ndefault_ca=d\n[d]\ndatabase={database}\nnew_certs_dir={self.folder}\n"
                              "default_md=sha256\npolicy=p\nrand_serial=yes\nunique_subject=no\n"
                              "[p]\ncommonName=supplied\n")
            _openssl("ca", "-batch", "-notext", "-config", config, "-in", request, "-cert", self.ca,
                     "-keyfile", self._key, "-startdate", days[0], "-enddate", days[1],
                     "-extfile", extensions, "-out", cert)
        return cert, key

    def credentials(self, name: str, **kwargs) -> Credentials:
        cert, key = self.issue(name, **kwargs)
        return Credentials(str(self.ca), str(cert), str(key))

    def bearer(self, token: str) -> Credentials:
        return Credentials(str(self.ca), token=token)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")


def _openssl(*args) -> None:
    done = subprocess.run(["openssl", *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def token_entry(name: str, token: str, *roles: str, tenant: str = "") -> dict:
    entry = {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), "roles": list(roles)}
    return entry | ({"tenant": tenant} if tenant else {})


def write_access(path: Path, *, certificates=(), tokens=(), tenants=None) -> Path:
    """Writes an access file and puts it in place as a whole."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"certificates": list(certificates), "tokens": list(tokens),
                               "tenants": tenants or {}}))
    new.rename(path)
    return path


def node_flags(pki: Pki, access: Path, name: str, *, client: str = "optional") -> list[str]:
    cert, key = pki.issue(name)
    return ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(pki.ca), "--access-file", str(access),
            "--tls-client-certificate", client, "--security-reload-seconds", "1"]
