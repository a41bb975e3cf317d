"""The interface that reaches other hosts, compared with the output of `ip`."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from planner.trainer.network import VARIABLE, choose_interface, interface_towards


@pytest.fixture
def interface() -> tuple[str, str]:
    """Name and first address of an interface other than the loopback."""
    try:
        answer = subprocess.run(["ip", "-j", "-4", "address"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no `ip` here")
    found = [each for each in json.loads(answer) if each and "LOOPBACK" not in each["flags"]]
    if not found:
        pytest.skip("nothing but the loopback here")
    return found[0]["ifname"], found[0]["addr_info"][0]["local"]


def test_the_interface_is_the_one_that_has_the_address(interface):
    name, address = interface
    assert interface_towards(address) == name
    assert interface_towards("127.0.0.1") == ""
    assert interface_towards("no-such-host.invalid") == ""


def test_it_is_chosen_for_several_hosts_unless_the_user_has(interface, monkeypatch):
    name, address = interface
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for ranks_here, given, wanted in (("4", None, None), ("2", "mine", "mine"), ("2", None, name)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
        monkeypatch.delenv(VARIABLE, raising=False)
        if given is not None:
            monkeypatch.setenv(VARIABLE, given)
        choose_interface()
        assert os.environ.get(VARIABLE) == wanted
