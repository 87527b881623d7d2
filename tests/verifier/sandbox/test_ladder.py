"""What programs may import, and whether the check of a sandbox would see what that lets in."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import socket
import tempfile

import pytest
from hostile import why_not

from nearpolicy.errors import VerifierError
from nearpolicy.verifier.sandbox.ladder import installed, opened
from nearpolicy.verifier.sandbox.pool import Workers
from nearpolicy.verifier.sandbox.probe import escapes


def needs(isolation: str) -> None:
    if (reason := why_not(isolation)) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("name", ["time", "os", "io", "sys"])
def test_a_part_of_python_itself_lets_no_folder_of_this_machine_in(name):
    """Its origin is a word such as `built-in`; taken for a path, that is the working folder: the root of a worker."""
    with pytest.raises(VerifierError, match=f"verifier.packages names '{name}', which is a part of Python"):
        installed([name])
    with pytest.raises(VerifierError, match=f"verifier.packages names '{name}'"):
        asyncio.run(opened("namespaces", workers=1, packages=[name], allow_unisolated=False))


@pytest.mark.parametrize("name", ["no_such_package", "no_such.sub", "numpy.linalg", ""])
def test_what_cannot_be_given_to_programs_is_refused_by_its_name(name):
    with pytest.raises(VerifierError, match=f"verifier.packages names '{name}'"):
        installed([name])


def test_a_module_of_one_file_is_that_file():
    assert installed(["math"]) == [math.__file__]
    importlib.import_module("six")  # which then calls itself a package
    [six] = installed(["six"])
    assert os.path.basename(six) == "six.py"


@pytest.mark.parametrize("isolation", ["namespaces", "landlock"])
def test_the_check_sees_what_packages_let_in(isolation):
    needs(isolation)

    async def run():
        sandbox = Workers(isolation, 1, ["/"])
        try:
            return await escapes(sandbox), await escapes(sandbox, packages=True)
        finally:
            await sandbox.close()

    without, with_packages = asyncio.run(run())
    assert without == []
    assert "read a file of this machine" in with_packages


def test_a_check_that_cannot_be_made_leaves_no_folder(tmp_path, monkeypatch):
    class NoLoopback(socket.socket):
        def bind(self, address):
            raise OSError("no loopback")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(socket, "socket", NoLoopback)
    assert "no loopback" in asyncio.run(escapes(None))
    assert list(tmp_path.iterdir()) == []
