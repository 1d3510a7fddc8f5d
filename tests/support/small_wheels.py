"""Wheels of one module, written by hand, for tests that install packages without an index."""

import base64
import hashlib
import zipfile


def write_package(folder, name, version="1.0", text=""):
    """Write a wheel with one module, by hand."""
    info = f"{name}-{version}.dist-info"
    contents = {
        f"{name}.py": text or f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        lines = []
        for path, content in contents.items():
            archive.writestr(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest())
            lines.append(f"{path},sha256={digest.rstrip(b'=').decode()},{len(content)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]) + "\n")
    return wheel
